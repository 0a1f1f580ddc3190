// All conversations of this browser: in memory, and each in a record of its own.
//
// So tabs with different conversations write different records. Tabs with the same one merge what
// they read before they write, and again when they hear of a change.

import { conversationOf, conversationOfMessages } from "./conversation.js";
import { load, names, onChangeElsewhere, remove, save } from "./stored.js";

const START = "chat.";

export class Conversations {
  // `hear(conversation)` is called when another tab has changed one, or removed it.
  constructor(hear) {
    this.all = new Map();
    this.unsaved = new Set(); // ids of those whose last change the browser did not keep
    for (const name of names(START)) {
      const conversation = conversationOf(load(name));
      if (conversation) this.all.set(conversation.id, conversation);
    }
    this.migrate();
    // Answers that a reload has cut off. One that another tab still writes comes with its next save.
    for (const { answer } of [...this.all.values()].flatMap(({ turns }) => turns)) {
      answer.ended ??= "stopped";
    }
    onChangeElsewhere((name) => {
      if (name.startsWith(START)) this.take(name.slice(START.length), hear);
    });
  }

  migrate() {
    const conversation = conversationOfMessages(load("conversation"));
    if (conversation.turns.length) this.add(conversation);
    if (!this.unsaved.size) remove("conversation");
  }

  take(id, hear) {
    const stored = conversationOf(load(START + id));
    const own = this.all.get(id);
    if (stored && own) {
      if (own.merge(stored)) this.save(own);
    } else if (stored) {
      this.all.set(id, stored);
    } else {
      this.all.delete(id);
    }
    if (stored || own) hear(own ?? stored);
  }

  has({ id }) {
    return this.all.has(id);
  }

  // The last used first.
  get list() {
    return [...this.all.values()].sort((a, b) => b.used - a.used);
  }

  add(conversation) {
    this.all.set(conversation.id, conversation);
    this.save(conversation);
  }

  // Keep a change. A conversation that has been removed meanwhile stays so.
  save(conversation) {
    if (!this.has(conversation)) return;
    const stored = conversationOf(load(START + conversation.id));
    if (stored) conversation.merge(stored);
    if (save(START + conversation.id, conversation)) this.unsaved.delete(conversation.id);
    else this.unsaved.add(conversation.id);
  }

  remove(conversation) {
    this.all.delete(conversation.id);
    remove(START + conversation.id);
    this.unsaved.delete(conversation.id);
    // There may be room for them now.
    for (const id of this.unsaved) this.save(this.all.get(id));
  }
}
