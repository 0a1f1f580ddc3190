// One streamed answer of POST /v1/chat/completions.

// A request that failed, in words for the reader: `what` happened, and `why`.
export class Trouble extends Error {
  constructor(what, why = "") {
    super(what);
    this.what = what;
    this.why = why;
  }
}

// Yields the stream's events as they come: {content}, {finish_reason} and {usage}.
// Throws Trouble; throws AbortError where `signal` stops it.
export async function* streamCompletion(body, signal) {
  const response = await post(body, signal);
  let finished = false;
  for await (const data of serverSentEvents(response.body, signal)) {
    if (data === "[DONE]") return;
    const event = parsed(data);
    if (event.error) {
      throw new Trouble("The server broke the answer off.", messageOf(event));
    }
    const choice = event.choices?.[0];
    if (choice?.delta?.content) yield { content: choice.delta.content };
    if (choice?.finish_reason) {
      finished = true;
      yield { finish_reason: choice.finish_reason };
    }
    if (event.usage) yield { usage: event.usage };
  }
  if (!finished) throw new Trouble("The connection closed before the answer was whole.");
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
    throw asTrouble(error, "The connection broke before the answer was whole.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Trouble("The server sent something that is no JSON.", data.slice(0, 200));
  }
}

function asTrouble(error, what = "The server cannot be reached.") {
  if (error instanceof Trouble || error.name === "AbortError") return error;
  return new Trouble(what, "Is it still running?");
}

const REFUSALS = {
  401: "The server asks for an API key. Load the page again to give one.",
  404: "The server does not know this model.",
  413: "This conversation is too long for the server.",
  429: "The server is busy: too many questions are waiting.",
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
