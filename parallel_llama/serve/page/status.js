// The server's status from GET /status, and the panel that shows it.

import { fromTemplate } from "./elements.js";

const EVERY_MS = 1000;
const TIMEOUT_MS = 5000;
const STALLED_S = 5;
const SPEEDS_KEPT = 60;

// Request the status once a second while `wanted()` and the page is visible. Calls `show` with it, or
// with null if the server does not answer. Returns if the server has no /status.
export async function watchStatus(wanted, show) {
  for (let first = true; ; first = false) {
    if (first || (wanted() && document.visibilityState === "visible")) {
      const status = await askStatus();
      if (status === undefined) return;
      show(status);
    }
    await new Promise((resume) => setTimeout(resume, EVERY_MS));
  }
}

async function askStatus() {
  try {
    const response = await fetch("status", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.status === 404) return undefined;
    return response.ok ? await response.json() : null;
  } catch {
    return null;
  }
}

const WORDS = {
  ready: "ready",
  loading: "loading the model",
  restarting: "restarting the ranks",
  draining: "shutting down, accepts no new requests",
  ended: "the model has stopped",
};

export function stateWords(status) {
  if (!status) return "no answer";
  const lost = status.ranks?.filter((rank) => !rank.up).length ?? 0;
  if (status.state === "ready" && lost) return `${lost} of ${status.ranks.length} ranks lost`;
  return WORDS[status.state] ?? status.state ?? "unknown";
}

export function isWell(status) {
  return stateWords(status) === "ready";
}

// "2 ranks, float32, 8,192 tokens of context", or the parts of it that are known.
export function shapeWords(status) {
  const { tp_size, dtype, quant, max_model_len } = status ?? {};
  return [
    tp_size && `${tp_size} ${tp_size === 1 ? "rank" : "ranks"}`,
    quant && quant !== "none" ? quant : dtype,
    max_model_len && `${count(max_model_len)} tokens of context`,
  ]
    .filter(Boolean)
    .join(", ");
}

export class StatusPanel {
  constructor(panel) {
    this.panel = panel;
    this.speeds = [];
  }

  show(status) {
    const well = isWell(status);
    this.text("state", stateWords(status));
    this.part("state").classList.toggle("well", well);
    this.text("shape", shapeWords(status));
    this.showSpeed(status ?? {});
    this.showCache(status?.kv ?? {});
    this.showRanks(status?.ranks ?? [], status?.kv?.bytes_per_rank ?? 0);
    this.text("version", versionWords(status ?? {}));
  }

  part(id) {
    return this.panel.querySelector(`#${id}`);
  }

  text(id, words) {
    const element = this.part(id);
    if (element.textContent !== words) element.textContent = words;
  }

  showSpeed({ tokens_per_s, tokens_per_s_minute, step_ms, step_age_s, n_running, n_waiting }) {
    this.text("speed", known(tokens_per_s, (value) => decimal(value, 1)));
    this.text("speed-minute", known(tokens_per_s_minute, (value) => decimal(value, 1)));
    this.text("step", known(step_ms, (value) => `${decimal(value, 1)} ms`));
    this.text("running", known(n_running, count));
    this.text("waiting", known(n_waiting, count));
    const stalled = n_running > 0 && step_age_s > STALLED_S;
    this.part("stalled").hidden = !stalled;
    if (stalled) this.text("stalled", `No step for ${decimal(step_age_s, 0)} seconds.`);
    this.speeds = [...this.speeds, tokens_per_s ?? 0].slice(-SPEEDS_KEPT);
    this.part("speed-line").firstElementChild.setAttribute("points", line(this.speeds));
  }

  showCache({ tokens_used, tokens_cached, tokens_total, bytes_per_rank }) {
    this.text("kv-used", known(tokens_used, count));
    this.text("kv-cached", known(tokens_cached, count));
    this.text("kv-total", known(tokens_total, (value) => `${count(value)} tokens`));
    this.text("kv-bytes", known(bytes_per_rank, mebibytes));
    shares(this.part("kv-bar"), [tokens_used, tokens_cached], tokens_total);
  }

  showRanks(ranks, kvBytes) {
    const list = this.part("rank-list");
    while (list.children.length > ranks.length) list.lastElementChild.remove();
    while (list.children.length < ranks.length) list.append(fromTemplate("rank-template"));
    const most = Math.max(...ranks.map((rank) => Math.max(rank.memory_bytes ?? 0, reserved(rank, kvBytes))));
    ranks.forEach((rank, index) => showRank(list.children[index], rank, kvBytes, most));
    this.part("rank-legend").hidden = !ranks.length;
  }
}

function reserved({ weight_bytes }, kvBytes) {
  return (weight_bytes ?? 0) + kvBytes;
}

function showRank(row, { rank, up, memory_bytes, weight_bytes, cuda_bytes }, kvBytes, most) {
  const part = (selector) => row.querySelector(selector);
  row.classList.toggle("lost", !up);
  part(".rank").textContent = `Rank ${rank}${up ? "" : " is lost"}`;
  part(".resident").textContent = up ? known(memory_bytes, mebibytes) : "–";
  part(".reserved").textContent = known(weight_bytes, (bytes) => mebibytes(bytes + kvBytes));
  part(".on-gpu").hidden = !cuda_bytes;
  part(".on-gpu dd").textContent = known(cuda_bytes, mebibytes);
  row.title = weight_bytes ? `${mebibytes(weight_bytes)} of weights, ${mebibytes(kvBytes)} of KV cache` : "";
  shares(part(".resident-bar"), [up ? memory_bytes : 0], most);
  shares(part(".reserved-bar"), [weight_bytes, kvBytes], most);
}

// Set the widths of a bar's parts through the style object: the Content-Security-Policy forbids inline
// styles.
function shares(bar, parts, whole) {
  parts.forEach((part, index) => {
    const share = whole > 0 ? Math.min(Math.max((part ?? 0) / whole, 0), 1) : 0;
    bar.children[index].style.width = `${100 * share}%`;
  });
}

function line(values) {
  const most = Math.max(...values, 1);
  const step = 120 / (SPEEDS_KEPT - 1);
  const first = SPEEDS_KEPT - values.length;
  return values
    .map((value, index) => `${((first + index) * step).toFixed(1)},${(30 - (28 * value) / most).toFixed(1)}`)
    .join(" ");
}

function versionWords({ version, n_restarts }) {
  const restarts = n_restarts ? `${n_restarts} ${n_restarts === 1 ? "restart" : "restarts"}` : "";
  return [version && `parallel_llama ${version}`, restarts].filter(Boolean).join(" · ");
}

function known(value, words) {
  return value === null || value === undefined ? "–" : words(value);
}

export function count(value) {
  return value.toLocaleString("en");
}

export function decimal(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function mebibytes(bytes) {
  const mebi = bytes / 2 ** 20;
  return mebi < 10240 ? `${decimal(mebi, 0)} MiB` : `${decimal(mebi / 1024, 1)} GiB`;
}
