// One answer on its way: from the server's events to the turn that holds it.

import { streamCompletion, Trouble } from "./completion.js";

// Write the answer to a request into `answer`, and call `draw` after each piece.
export async function receive(answer, body, signal, draw) {
  const started = performance.now();
  const seen = { n: 0, first: 0, last: 0 };
  try {
    for await (const event of streamCompletion(body, signal)) {
      if (event.content) {
        answer.content += event.content;
        seen.last = performance.now();
        seen.first ||= seen.last;
        seen.n += 1;
      }
      if (event.finish_reason) answer.ended = event.finish_reason;
      answer.measures = measures(started, seen, event.usage);
      draw();
    }
    answer.ended ??= "stop";
  } catch (error) {
    answer.ended = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.trouble = trouble(error);
  }
}

// Until the server has counted tokens, its chunks stand for them.
function measures(started, { n, first, last }, usage) {
  const n_tokens = usage?.completion_tokens ?? n;
  return {
    n_tokens,
    first_token_s: first && (first - started) / 1000,
    tokens_per_s: n_tokens > 1 && last > first ? (1000 * (n_tokens - 1)) / (last - first) : 0,
    n_context: usage?.total_tokens ?? null,
  };
}

function trouble(error) {
  if (error instanceof Trouble) return { what: error.what, why: error.why };
  return { what: "The page could not show the answer.", why: String(error) };
}
