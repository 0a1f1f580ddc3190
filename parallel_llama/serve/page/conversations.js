// All conversations of this browser: in memory, and each in its own stored record.
//
// Tabs with different conversations write different records. Tabs with the same conversation merge the
// stored record before they write, and whenever another tab has changed it.

import { conversationOf, conversationOfMessages } from "./conversation.js";
import { load, names, onChangeElsewhere, remove, save } from "./stored.js";

const START = "chat.";

export class Conversations {
  // `onChange(conversation)` is called when another tab has changed or removed a conversation.
  constructor(onChange) {
    this.all = new Map();
    this.unsaved = new Set(); // ids whose last change the browser did not store
    for (const name of names(START)) {
      const conversation = conversationOf(load(name));
      if (conversation) this.all.set(conversation.id, conversation);
    }
    this.migrate();
    // Answers interrupted by a reload. If another tab still receives one, its next save corrects this.
    for (const { answer } of [...this.all.values()].flatMap(({ turns }) => turns)) {
      answer.ended ??= "stopped";
    }
    onChangeElsewhere((name) => {
      if (name.startsWith(START)) this.take(name.slice(START.length), onChange);
    });
  }

  migrate() {
    const conversation = conversationOfMessages(load("conversation"));
    if (conversation.turns.length) this.add(conversation);
    if (!this.unsaved.size) remove("conversation");
  }

  take(id, onChange) {
    const stored = conversationOf(load(START + id));
    const own = this.all.get(id);
    if (stored && own) {
      if (own.merge(stored)) this.save(own);
    } else if (stored) {
      this.all.set(id, stored);
    } else {
      this.all.delete(id);
    }
    if (stored || own) onChange(own ?? stored);
  }

  has({ id }) {
    return this.all.has(id);
  }

  // Most recently used first.
  get list() {
    return [...this.all.values()].sort((a, b) => b.used - a.used);
  }

  add(conversation) {
    this.all.set(conversation.id, conversation);
    this.save(conversation);
  }

  // Store a change. A conversation that has been removed in the meantime stays removed.
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
    // The storage may now have room for the unsaved conversations.
    for (const id of this.unsaved) this.save(this.all.get(id));
  }
}
