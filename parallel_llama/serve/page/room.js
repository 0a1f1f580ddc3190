// Whether a conversation fits in the model's context and in the KV cache.

import { count } from "./status.js";

// Tokens that a chat template may add to each message, and in total.
const MESSAGE_TOKENS = 32;
const TEMPLATE_TOKENS = 256;
const TIMEOUT_MS = 5000;

// Warn if fewer tokens than this are left for the answer.
export const SCARCE_TOKENS = 256;

// The number of tokens of these messages with the chat template. Asks the server only if there may be
// more than `most`; null if there cannot be, or the server does not answer.
export async function countTokens(model, messages, most) {
  if (Number.isNaN(most) || upperBound(messages) <= most) return null;
  try {
    const response = await fetch("tokenize", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model, messages }),
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (response.status === 413) return Infinity; // the body is too long for the server
    return response.ok ? (await response.json()).count : null;
  } catch {
    return null;
  }
}

// A token has at least one byte.
function upperBound(messages) {
  const bytes = messages.map(({ content }) => new Blob([content]).size + MESSAGE_TOKENS);
  return bytes.reduce((sum, each) => sum + each, TEMPLATE_TOKENS);
}

// A warning about `n` tokens before they are sent; "" if they fit. `most` is the maximum number of
// tokens of the conversation and the answer together.
export function roomWords(n, most, isFirst) {
  if (n === null || most - n >= SCARCE_TOKENS) return "";
  const left = most - n;
  if (left > 0) return `${left === 1 ? "Only one token is" : `Only ${count(left)} tokens are`} left for the answer.`;
  const tokens = n === Infinity ? "more text than the server accepts" : `${count(n)} tokens`;
  const what = isFirst ? "Your question has" : "This chat, with your question, has";
  const remedy = isFirst ? "Shorten it." : "Shorten the question, or start a new chat.";
  return `${what} ${tokens}. The server accepts at most ${count(most - 1)}. ${remedy}`;
}
