// The chat page: handlers of its buttons and keys.

import { ChatList } from "./chats.js";
import { receive } from "./completion.js";
import { Conversation } from "./conversation.js";
import { Conversations } from "./conversations.js";
import { showItems, showToast } from "./elements.js";
import { copy } from "./markdown.js";
import { countTokens, roomWords, SCARCE_TOKENS } from "./room.js";
import { Settings } from "./settings.js";
import { Sides } from "./sides.js";
import { count, isWell, shapeWords, stateWords, StatusPanel, watchStatus } from "./status.js";
import { forgetAll, loadOfTab, onChangeElsewhere, saveOfTab } from "./stored.js";
import { editElement, growWithText, showTurn, turnElement } from "./turns.js";

const BARS = 8; // of the logo: one per rank, at most this many
const SAVE_EVERY_MS = 1000; // while an answer is generated
const TYPING_MS = 300;

const byId = (id) => document.getElementById(id);
const scroller = byId("conversation");
const messages = byId("messages");
const question = byId("question");
const panel = byId("panel");

const conversations = new Conversations(changedElsewhere);
const settings = new Settings(byId("settings"));
const statusPanel = new StatusPanel(panel);
const sides = new Sides(
  {
    chats: { element: byId("chats"), toggle: byId("toggle-chats"), close: byId("close-chats") },
    panel: { element: panel, toggle: byId("toggle-panel"), close: byId("close-panel") },
  },
  [document.querySelector(".bar"), scroller, byId("composer")],
  byId("backdrop"),
);

let conversation = firstConversation();
let model = null; // {id, max_fitting_tokens}, once the server has sent it
let status = null;
let hadTrouble = false; // since the last status
let following = true; // scroll to the end of the conversation as it grows
const answering = new Map(); // conversation id: {turn, answer, stop} of the answer being generated

const chats = new ChatList(conversations, {
  get opened() {
    return conversation;
  },
  isAnswering: ({ id }) => answering.has(id),
  open: (chosen) => openChat(chosen),
  rename: (chosen, name) => {
    chosen.rename(name);
    keep(chosen);
  },
  remove: removeChats,
  take: takeChats,
  say: showToast,
});

// ---- conversations ----

// The conversation that was open in this tab, or the last used one.
function firstConversation() {
  const id = loadOfTab("open");
  const last = id === null ? conversations.list[0] : conversations.all.get(id);
  return last ?? new Conversation();
}

function openChat(chosen) {
  conversation = chosen;
  saveOfTab("open", conversations.has(chosen) ? chosen.id : "");
  messages.replaceChildren();
  showConversation();
  showRoom();
  following = true;
  followEnd();
  if (!sides.closeDrawer()) question.focus();
}

function showConversation() {
  showItems(messages, conversation.turns, turnElement, (element, turn) => {
    if (element.dataset.version === String(turn.version)) return;
    element.dataset.version = turn.version;
    showTurn(element, turn);
  });
  byId("welcome").hidden = conversation.turns.length > 0;
  const isAnswering = answering.has(conversation.id);
  byId("send").hidden = isAnswering;
  byId("stop").hidden = !isAnswering;
  byId("mark").classList.toggle("busy", answering.size > 0);
  chats.show();
  showContext();
  showModel();
}

// Store and show a change, merged with the changes of other tabs.
function keep(changed) {
  conversations.save(changed);
  showUnsaved();
  if (changed === conversation) showConversation();
  else chats.show();
}

function showUnsaved() {
  byId("unsaved").hidden = !conversations.unsaved.size;
}

function changedElsewhere(changed) {
  const running = answering.get(changed.id);
  const isHere = conversations.has(changed) && changed.turns.includes(running?.turn);
  if (running && !(isHere && running.turn.answer === running.answer)) running.stop.abort();
  if (changed.id !== conversation.id) return chats.show();
  if (conversations.has(changed)) {
    conversation = changed;
    showConversation();
    followEnd();
  } else {
    openChat(new Conversation());
    showToast("This chat was deleted in another tab.");
  }
}

function removeChats(removed) {
  const opened = conversation;
  for (const each of removed) {
    answering.get(each.id)?.stop.abort();
    conversations.remove(each);
  }
  if (removed.includes(opened)) openChat(new Conversation());
  else chats.show();
  showUnsaved();
  const what = removed.length === 1 ? `“${removed[0].title}”` : `${count(removed.length)} chats`;
  showToast(`Deleted ${what}.`, () => {
    for (const each of removed) conversations.add(each);
    if (removed.includes(opened) && !conversation.turns.length) openChat(opened);
    keep(removed[0]);
  });
}

function takeChats(imported) {
  for (const each of imported) {
    const own = conversations.all.get(each.id) ?? each;
    if (own !== each) own.merge(each);
    conversations.add(own);
  }
  showUnsaved();
  showConversation();
  showToast(`Imported ${imported.length === 1 ? "one chat" : `${count(imported.length)} chats`}.`);
}

// ---- answers ----

// Ask a question that replaces the turns from an index on. Returns whether it fits; if not,
// `warning` shows why.
async function ask(text, warning, at = conversation.turns.length) {
  const asked = conversation;
  if (!text.trim() || !(await fits(text.trim(), warning, at)) || asked !== conversation) return false;
  answering.get(asked.id)?.stop.abort();
  const turn = asked.ask(text.trim(), at);
  if (!conversations.has(asked)) {
    conversations.add(asked);
    saveOfTab("open", asked.id);
  }
  answer(asked, turn);
  return true;
}

function regenerate(turn) {
  turn.answer = { content: "" };
  answer(conversation, turn);
}

// Let the model continue its answer. The request contains the answer without trailing spaces, so the
// page removes them too.
function continueAnswer(turn) {
  turn.answer.content = turn.answer.content.trimEnd();
  answer(conversation, turn, true);
}

async function answer(asked, turn, continues = false) {
  answering.get(asked.id)?.stop.abort();
  const { answer } = turn;
  const running = { turn, answer, stop: new AbortController() };
  answering.set(asked.id, running);
  delete answer.ended;
  delete answer.trouble;
  asked.touch(turn);
  following = true;
  keep(asked);
  followEnd();
  let saved = performance.now();
  const draw = oncePerFrame(() => {
    const element = [...messages.children].find((each) => each.dataset.id === turn.id);
    if (element) showTurn(element, turn);
    if (performance.now() - saved < SAVE_EVERY_MS) return;
    saved = performance.now();
    asked.touch(turn);
    conversations.save(asked);
  });
  const body = await request(asked, turn, continues);
  await receive(answer, body, model?.max_fitting_tokens, running.stop.signal, draw);
  if (answering.get(asked.id) === running) answering.delete(asked.id);
  if (answer.trouble) {
    model = null; // the next answer may come from another server
    if (continues) answer.trouble.retry = "continue";
    hadTrouble = true;
  }
  if (turn.answer === answer) asked.touch(turn);
  keep(asked);
  if (asked === conversation) followEnd();
}

async function request(asked, turn, continues) {
  const messages = asked.messages(settings.system, asked.turns.indexOf(turn), turn.question);
  if (continues) messages.push({ role: "assistant", content: turn.answer.content });
  const { max_tokens, ...sampling } = settings.sampling;
  const { id, max_fitting_tokens } = (await modelOfServer()) ?? {};
  const n = await countTokens(id, messages, max_fitting_tokens - max_tokens);
  return {
    model: id,
    messages,
    ...sampling,
    max_tokens: n === null ? max_tokens : Math.max(1, Math.min(max_tokens, max_fitting_tokens - n)),
    ...(continues ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

async function modelOfServer() {
  if (!model) {
    try {
      const response = await fetch("v1/models");
      model = (await response.json()).data[0];
    } catch {
      return null; // the request for the answer reports the error
    }
    showModel();
  }
  return model;
}

function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    // A hidden page has no animation frames.
    const next = document.hidden ? (then) => setTimeout(then, 100) : requestAnimationFrame;
    next(() => {
      asked = false;
      draw();
      followEnd();
    });
  };
}

function followEnd() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
  showToEnd();
}

function showToEnd() {
  byId("to-end").hidden = following || scroller.scrollHeight <= scroller.clientHeight;
}

function showContext() {
  const n = conversation.turns.at(-1)?.answer.measures?.n_context;
  const most = model?.max_fitting_tokens;
  byId("context").textContent = n ? `${count(n)}${most ? ` of ${count(most)}` : ""} tokens` : "";
}

// ---- room for a question ----

// Returns without counting tokens if the server has not sent its model yet.
async function fits(text, warning, at) {
  const { id, max_fitting_tokens } = model ?? {};
  const messages = conversation.messages(settings.system, at, text);
  const n = await countTokens(id, messages, max_fitting_tokens - SCARCE_TOKENS);
  warning.textContent = roomWords(n, max_fitting_tokens, messages.length === 1);
  warning.hidden = !warning.textContent;
  return n === null || n < max_fitting_tokens;
}

let typing = 0;

function showRoom() {
  clearTimeout(typing);
  const text = question.value.trim();
  if (!text) byId("room").hidden = true;
  else typing = setTimeout(() => fits(text, byId("room"), conversation.turns.length), TYPING_MS);
}

// ---- buttons of messages ----

const ACTIONS = {
  edit: (turn, element) => edit(turn, element),
  regenerate: (turn) => regenerate(turn),
  continue: (turn) => continueAnswer(turn),
  copy: (turn, element, button) => copy(turn.answer.content, button, element.querySelector(".body")),
};

messages.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-do]");
  const element = button?.closest(".turn");
  const turn = conversation.turns.find(({ id }) => id === element?.dataset.id);
  if (turn) ACTIONS[button.dataset.do]?.(turn, element, button);
});

function edit(turn, element) {
  const at = conversation.turns.indexOf(turn);
  const shown = element.querySelector(".question");
  const form = editElement(turn.question, 2 * (conversation.turns.length - at) - 1);
  const field = form.querySelector("textarea");
  const kept = [...shown.querySelectorAll(".asked, .tools")];
  const close = () => {
    form.replaceWith(...kept);
    element.querySelector("[data-do=edit]").focus();
  };
  kept[0].replaceWith(form);
  kept[1].remove();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (await ask(field.value, form.querySelector(".notice"), conversation.turns.indexOf(turn))) question.focus();
  });
  form.querySelector("[data-do=cancel]").addEventListener("click", close);
  sendOnEnter(field, form);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  });
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

// ---- the question ----

function sendOnEnter(field, form) {
  field.addEventListener("keydown", (event) => {
    // In an input method, Enter accepts a suggestion.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

growWithText(question);
sendOnEnter(question, byId("composer"));
question.addEventListener("input", showRoom);

let isSending = false;

byId("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (isSending || answering.has(conversation.id)) return;
  isSending = true;
  const text = question.value;
  const isAsked = await ask(text, byId("room")).finally(() => (isSending = false));
  if (!isAsked || question.value !== text) return;
  question.value = "";
  question.dispatchEvent(new Event("input"));
});

function stop() {
  answering.get(conversation.id)?.stop.abort();
}

byId("stop").addEventListener("click", () => {
  stop();
  question.focus();
});

byId("new-chat").addEventListener("click", () => openChat(new Conversation()));

byId("welcome").addEventListener("click", ({ target }) => {
  if (target.matches("button")) ask(target.textContent, byId("room"));
});

byId("to-end").addEventListener("click", () => {
  following = true;
  followEnd();
});

scroller.addEventListener("scroll", () => {
  following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  showToEnd();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("settings").open || document.querySelector(":popover-open")) return;
  if (!sides.closeDrawer()) stop();
});

// ---- settings ----

byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("reset-settings").addEventListener("click", () => settings.reset());
byId("forget").addEventListener("click", () => {
  if (!confirm("Delete all chats and settings from this browser?")) return;
  for (const { stop } of answering.values()) stop.abort();
  answering.clear();
  conversations.all.clear();
  forgetAll();
  location.reload();
});
onChangeElsewhere((name) => {
  if (name === "settings" && !byId("settings").open) settings.restore();
});

// Store unfinished answers when the page is closed.
addEventListener("pagehide", () => {
  for (const [id, { turn, answer, stop }] of answering) {
    stop.abort();
    answer.ended = "stopped";
    conversations.all.get(id)?.touch(turn);
    keep(conversations.all.get(id) ?? conversation);
  }
});

// ---- ranks ----

function showStatus(now) {
  status = now;
  hadTrouble = false;
  if (byId("toggle-panel").hidden) {
    byId("toggle-panel").hidden = false;
    sides.place("panel");
  }
  statusPanel.show(now);
  settings.showDefaults(now?.defaults ?? {});
  byId("notice").hidden = isWell(now);
  const words = now ? `${stateWords(now)}.` : "The server does not answer. The page retries every second.";
  byId("notice").textContent = isWell(now) ? "" : words[0].toUpperCase() + words.slice(1);
  showModel();
  showMark(now?.ranks ?? []);
  showContext();
}

function showMark(ranks) {
  const mark = byId("mark");
  const bars = ranks.length ? ranks.slice(0, BARS) : [{ up: true }, { up: true }];
  while (mark.children.length > bars.length) mark.lastElementChild.remove();
  while (mark.children.length < bars.length) mark.append(document.createElement("i"));
  bars.forEach((rank, index) => mark.children[index].classList.toggle("lost", !rank.up));
}

function showModel() {
  const name = model?.id || status?.model || "";
  byId("model").textContent = name;
  byId("welcome-model").textContent = [name, shapeWords(status)].filter(Boolean).join(" · ");
  const title = conversation.turns.length ? conversation.title : "";
  document.title = [title, name, "parallel_llama"].filter(Boolean).join(" · ");
}

async function start() {
  showConversation();
  followEnd();
  modelOfServer();
  const wanted = () => !panel.hidden || !isWell(status) || hadTrouble;
  await watchStatus(wanted, showStatus);
  status = null;
  byId("toggle-panel").hidden = true;
  byId("notice").hidden = true;
  sides.open("panel", false);
}

start();
