// Export of conversations to files, and import.

import { conversationOf } from "./conversation.js";

const FORMAT = "parallel_llama.conversations";

export function markdownOf({ title, turns }) {
  const parts = turns.flatMap(({ question, answer }) => [`## Question\n\n${question}`, `## Answer\n\n${answer.content}`]);
  return [`# ${title}`, ...parts].join("\n\n") + "\n";
}

export function jsonOf(conversations) {
  const titled = conversations.map((each) => ({ title: each.title, ...each }));
  return JSON.stringify({ format: FORMAT, conversations: titled }, null, 1) + "\n";
}

// Throws an Error with a message for the user.
export function conversationsOf(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not valid JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file was not exported by this page.");
  }
  const conversations = file.conversations.map(conversationOf);
  if (conversations.includes(null)) throw new Error("A conversation in this file is damaged.");
  return conversations;
}

export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// A file name made of a title's letters and digits.
export function fileName(title) {
  const words = title.toLowerCase().match(/[\p{L}\p{N}]+/gu) ?? ["chat"];
  return words.join("-").slice(0, 60);
}
