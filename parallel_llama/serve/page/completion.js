// A streamed answer of POST /v1/chat/completions.

// A failed request, described for the user: `what` happened, and `why`.
class Trouble extends Error {
  constructor(what, why = "") {
    super(what);
    this.what = what;
    this.why = why;
  }
}

// Append the response to a request to `answer`, and call `draw` after each piece. `most` is the
// maximum number of tokens of the conversation and the answer together, or 0.
export async function receive(answer, body, most, signal, draw) {
  const before = answer.measures ?? {};
  const started = performance.now();
  const seen = { n: 0, first: 0, last: 0 };
  delete answer.ended;
  delete answer.trouble;
  try {
    for await (const event of streamCompletion(body, signal)) {
      if (event.reasoning) answer.reasoning = (answer.reasoning ?? "") + event.reasoning;
      if (event.content) answer.content += event.content;
      if (event.content || event.reasoning) {
        seen.last = performance.now();
        seen.first ||= seen.last;
        seen.n += 1;
      }
      if (event.finish_reason) answer.ended = event.finish_reason;
      answer.measures = measures(before, started, seen, event.usage);
      draw();
    }
    answer.ended ??= "stop";
    if (answer.ended === "length" && most && answer.measures.n_context >= most) answer.ended = "full";
  } catch (error) {
    answer.ended = signal.aborted ? "stopped" : "failed";
    if (!signal.aborted) answer.trouble = trouble(error);
  }
}

// Until the server sends the usage, each chunk counts as one token.
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

// Yields the stream's events: {content}, {reasoning}, {finish_reason} and {usage}.
// Throws Trouble, or AbortError if `signal` aborts the request.
async function* streamCompletion(body, signal) {
  const response = await post(body, signal);
  let finished = false;
  for await (const data of serverSentEvents(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = parsed(data);
    if (event.error) {
      throw new Trouble("The server stopped with an error.", messageOf(event));
    }
    const choice = event.choices?.[0];
    if (choice?.delta?.content) yield { content: choice.delta.content };
    if (choice?.delta?.reasoning_content) yield { reasoning: choice.delta.reasoning_content };
    if (choice?.finish_reason) {
      finished = true;
      yield { finish_reason: choice.finish_reason };
    }
    if (event.usage) yield { usage: event.usage };
  }
  if (!finished) throw new Trouble("The connection closed before the answer was complete.");
}

async function post(body, signal) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
  } catch (error) {
    throw asTrouble(error);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function* serverSentEvents(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw asTrouble(error, "The connection failed before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Trouble("The server sent invalid JSON.", data.slice(0, 200));
  }
}

function asTrouble(error, what = "The server is not reachable.") {
  if (error instanceof Trouble || error.name === "AbortError") return error;
  return new Trouble(what, "Is it still running?");
}

const REFUSALS = {
  401: "The server requires an API key. Reload the page to enter one.",
  404: "The server does not know this model.",
  413: "This conversation is too long for the server.",
  429: "The server is busy: too many requests are waiting.",
  503: "The model is not ready yet.",
};

async function refusal(response) {
  const what =
    REFUSALS[response.status] ??
    (response.status >= 500
      ? `The server could not answer (${response.status}).`
      : `The server refused the request (${response.status}).`);
  const text = await response.text().catch(() => "");
  let why;
  try {
    why = messageOf(JSON.parse(text));
  } catch {
    why = text.slice(0, 200);
  }
  return new Trouble(what, [sentence(why), waiting(response)].filter(Boolean).join(" "));
}

function messageOf({ error, message }) {
  const text = error?.message ?? message ?? error;
  return typeof text === "string" ? text : "";
}

function sentence(text) {
  return text && !/[.!?]$/.test(text) ? `${text}.` : text;
}

function waiting(response) {
  const seconds = Number(response.headers.get("Retry-After"));
  return seconds > 0 ? `Try again in ${seconds === 1 ? "a second" : `${seconds} seconds`}.` : "";
}
