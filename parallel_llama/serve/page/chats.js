// The list of chats: search, and actions on one chat or on all.

import { fromTemplate, showItems } from "./elements.js";
import { conversationsOf, download, fileName, jsonOf, markdownOf } from "./exchange.js";

const AROUND = 12; // characters of context before a match

const byId = (id) => document.getElementById(id);

export class ChatList {
  // `page` has `opened` (the conversation that is shown), `isAnswering(conversation)`, and the actions
  // `open(conversation)`, `remove(conversations)`, `take(conversations)`, `rename` and `say`.
  constructor(conversations, page) {
    Object.assign(this, { conversations, page, chosen: null });
    this.items = byId("chat-list");
    this.menu = byId("chat-menu");
    byId("search").addEventListener("input", () => this.show());
    byId("search").addEventListener("keydown", (event) => {
      // Esc clears the search field, and must not also stop an answer.
      if (event.key === "Escape" && event.target.value) event.stopPropagation();
    });
    this.items.addEventListener("click", ({ target }) => this.click(target));
    this.menu.addEventListener("click", ({ target }) => this.choose(target.closest("button")));
    byId("export-all").addEventListener("click", () => {
      const day = new Date().toISOString().slice(0, 10);
      download(`conversations-${day}.json`, "application/json", jsonOf(conversations.list));
    });
    byId("delete-all").addEventListener("click", () => page.remove(conversations.list));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", ({ target }) => this.import(target));
  }

  show() {
    const query = byId("search").value.trim().toLowerCase();
    const all = this.conversations.list;
    const found = all.map((each) => ({ id: each.id, conversation: each, text: foundIn(each, query) }));
    const shown = found.filter(({ text }) => text !== null);
    showItems(this.items, shown, () => fromTemplate("chat-template"), (element, item) => this.showChat(element, item));
    byId("no-chats").hidden = shown.length > 0;
    byId("no-chats").textContent = all.length ? "Nothing found." : "No chats yet.";
    byId("export-all").hidden = byId("delete-all").hidden = !all.length;
  }

  showChat(element, { conversation, text }) {
    const { title } = conversation;
    const open = element.querySelector(".open");
    if (!open) return; // it is being renamed
    const name = open.querySelector(".title");
    if (name.textContent !== title) name.textContent = open.title = title;
    open.ariaCurrent = conversation.id === this.page.opened.id ? "true" : null;
    open.querySelector(".found").textContent = text;
    open.querySelector(".found").hidden = !text;
    open.querySelector(".writing").hidden = !this.page.isAnswering(conversation);
    element.querySelector(".more").ariaLabel = `More for “${title}”`;
  }

  click(target) {
    const item = target.closest("li");
    const conversation = this.conversations.all.get(item?.dataset.id);
    if (target.closest(".open")) this.page.open(conversation);
    if (target.closest(".more")) this.openMenu(target.closest(".more"), conversation);
  }

  openMenu(button, conversation) {
    this.chosen = conversation;
    this.menu.showPopover();
    const { left, bottom, top } = button.getBoundingClientRect();
    const { offsetWidth, offsetHeight } = this.menu;
    const fits = bottom + offsetHeight < innerHeight;
    this.menu.style.left = `${Math.min(left, innerWidth - offsetWidth - 8)}px`;
    this.menu.style.top = `${fits ? bottom : top - offsetHeight}px`;
    this.menu.querySelector("button").focus();
  }

  choose(button) {
    const conversation = this.chosen;
    if (!button) return;
    this.menu.hidePopover();
    const name = fileName(conversation.title);
    switch (button.dataset.do) {
      case "rename":
        return this.rename(conversation);
      case "markdown":
        return download(`${name}.md`, "text/markdown", markdownOf(conversation));
      case "json":
        return download(`${name}.json`, "application/json", jsonOf([conversation]));
      case "delete":
        return this.page.remove([conversation]);
    }
  }

  rename(conversation) {
    const item = [...this.items.children].find((element) => element.dataset.id === conversation.id);
    const form = fromTemplate("rename-template");
    const field = form.querySelector("input");
    const kept = [...item.children];
    field.value = conversation.title;
    item.replaceChildren(form);
    let closed = false; // the field's removal is a blur too
    const close = (isKept) => {
      if (closed) return;
      closed = true;
      item.replaceChildren(...kept);
      if (isKept && field.value.trim() !== conversation.title) this.page.rename(conversation, field.value);
      this.show();
      item.querySelector(".more").focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close(true);
    });
    field.addEventListener("blur", () => close(true));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close(false);
    });
    field.select();
  }

  async import(input) {
    const [file] = input.files;
    try {
      if (file) this.page.take(conversationsOf(await file.text()));
    } catch (error) {
      this.page.say(error.message);
    }
    input.value = "";
  }
}

// The text around the first match in a conversation, "" if its title matches, or null.
function foundIn({ title, turns }, query) {
  if (title.toLowerCase().includes(query)) return "";
  for (const text of turns.flatMap(({ question, answer }) => [question, answer.content])) {
    const at = text.toLowerCase().indexOf(query);
    if (at >= 0) return (at > AROUND ? "…" : "") + text.slice(Math.max(0, at - AROUND), at + 100).trim();
  }
  return null;
}
