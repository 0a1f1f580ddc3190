// Whether a conversation fits into the model's context.

import { count } from "./status.js";

// What a chat template may add, in tokens: to each message, and in all.
const MESSAGE_TOKENS = 32;
const TEMPLATE_TOKENS = 256;
const PATIENCE_MS = 5000;

// An answer with less room than this is worth a warning.
export const SCARCE_TOKENS = 256;

// Tokens of these messages in the model's template. Asks the server only where there may be more than
// `most`, and gives null where there surely are not, or where the server does not say.
export async function countTokens(model, messages, most) {
  if (Number.isNaN(most) || upperBound(messages) <= most) return null;
  try {
    const response = await fetch("tokenize", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ model, messages }),
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
    if (response.status === 413) return Infinity; // a body that is too long, even for the server
    return response.ok ? (await response.json()).count : null;
  } catch {
    return null;
  }
}

// No token is shorter than a byte.
function upperBound(messages) {
  const bytes = messages.map(({ content }) => new Blob([content]).size + MESSAGE_TOKENS);
  return bytes.reduce((sum, each) => sum + each, TEMPLATE_TOKENS);
}

// A warning about `n` tokens before they are sent; "" where there is room.
export function roomWords(n, context, isFirst) {
  if (n === null || context - n >= SCARCE_TOKENS) return "";
  const left = context - n;
  if (left > 0) return `${left === 1 ? "Only one token is" : `Only ${count(left)} tokens are`} left for the answer.`;
  const tokens = n === Infinity ? "more text than the server takes" : `${count(n)} tokens`;
  const what = isFirst ? "Your question has" : "This chat, with your question, has";
  const remedy = isFirst ? "Shorten it." : "Shorten the question, or start a new chat.";
  return `${what} ${tokens}. The model takes ${count(context - 1)} at most. ${remedy}`;
}
