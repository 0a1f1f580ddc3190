// One answer on its way: from the server's events to the turn that holds it.

import { streamCompletion, Trouble } from "./completion.js";

// Write the answer to a request into `answer`, behind what it has already, and call `draw` after each
// piece. `context` is the model's length, or 0.
export async function receive(answer, body, context, signal, draw) {
  const before = answer.measures ?? {};
  const started = performance.now();
  const seen = { n: 0, first: 0, last: 0 };
  delete answer.ended;
  delete answer.trouble;
  try {
    for await (const event of streamCompletion(body, signal)) {
      if (event.content) {
        answer.content += event.content;
        seen.last = performance.now();
        seen.first ||= seen.last;
        seen.n += 1;
      }
      if (event.finish_reason) answer.ended = event.finish_reason;
      answer.measures = measures(before, started, seen, event.usage);
      draw();
    }
    answer.ended ??= "stop";
    if (answer.ended === "length" && context && answer.measures.n_context >= context) answer.ended = "full";
  } catch (error) {
    answer.ended = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.trouble = trouble(error);
  }
}

// Until the server has counted tokens, its chunks stand for them.
function measures(before, started, { n, first, last }, usage) {
  const n_tokens = usage?.completion_tokens ?? n;
  return {
    n_tokens: (before.n_tokens ?? 0) + n_tokens,
    first_token_s: before.first_token_s || (first && (first - started) / 1000),
    tokens_per_s: n_tokens > 1 && last > first ? (1000 * (n_tokens - 1)) / (last - first) : 0,
    n_context: usage?.total_tokens ?? null,
  };
}

function trouble(error) {
  if (error instanceof Trouble) return { what: error.what, why: error.why };
  return { what: "The page could not show the answer.", why: String(error) };
}
