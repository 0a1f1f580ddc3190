// The messages of one conversation: questions and answers in turn.
//
// A question is {role: "user", content}. An answer is {role: "assistant", content} and, once it has
// ended, `ended` ("stop", "length", "stopped" by the reader, or "failed"), `trouble` where it failed,
// and `measures`. It is `plain` where its markdown cannot be shown.

import { load, save } from "./stored.js";

export class Conversation {
  constructor() {
    this.messages = load("conversation", []).filter(isMessage);
    // An answer that a reload has cut off.
    for (const message of this.messages) {
      if (message.role === "assistant") message.ended ??= "stopped";
    }
  }

  // Add a question and the answer that is to come. Returns the answer.
  ask(content) {
    this.messages.push({ role: "user", content });
    return this.beginAnswer();
  }

  beginAnswer() {
    const answer = { role: "assistant", content: "" };
    this.messages.push(answer);
    this.save();
    return answer;
  }

  // Drop the message at an index and all that follow.
  cut(index) {
    this.messages.length = index;
    this.save();
  }

  save() {
    save("conversation", this.messages);
  }

  // What the server is asked: chat templates want turns to alternate, so a question that got no
  // answer is left out, unless it is the last.
  request(system) {
    const turns = system ? [{ role: "system", content: system }] : [];
    this.messages.forEach(({ role, content }, index) => {
      if (role !== "user") return;
      const answer = this.messages[index + 1];
      const last = index >= this.messages.length - 2;
      if (!last && !answer?.content) return;
      turns.push({ role, content });
      if (!last) turns.push({ role: "assistant", content: answer.content });
    });
    return turns;
  }
}

function isMessage(message) {
  return ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
}
