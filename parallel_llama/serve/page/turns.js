// Questions and answers as elements of the page.

import { fromTemplate } from "./elements.js";
import { showMarkdown, showPlain } from "./markdown.js";
import { count, decimal } from "./status.js";

// A question with more lines or characters is folded.
const FOLD_LINES = 12;
const FOLD_CHARS = 1500;

export function turnElement({ question }) {
  const element = fromTemplate("turn-template");
  element.querySelector(".words").textContent = question;
  const isLong = question.length > FOLD_CHARS || question.split("\n").length > FOLD_LINES;
  const button = element.querySelector("[data-do=unfold]");
  button.hidden = !isLong;
  fold(element, isLong);
  button.addEventListener("click", () => fold(element, button.ariaExpanded === "true"));
  return element;
}

function fold(element, isFolded) {
  const button = element.querySelector("[data-do=unfold]");
  element.querySelector(".words").classList.toggle("folded", isFolded);
  button.ariaExpanded = String(!isFolded);
  button.textContent = isFolded ? "Show more" : "Show less";
}

// Update a turn's element to the current state of its answer.
export function showTurn(element, turn) {
  const { answer } = turn;
  const { content, reasoning, ended, trouble, measures } = answer;
  const shown = element.querySelector(".answer");
  const part = (selector) => shown.querySelector(selector);
  part(".thinking").hidden = !reasoning;
  showPlain(part(".thinking .prose"), reasoning ?? "");
  answer.plain ||= !showMarkdown(part(".body"), content);
  if (answer.plain) showPlain(part(".body"), content);
  // Screen readers should read an answer once it is complete, not word by word.
  shown.ariaBusy = String(!ended);
  part(".waiting").hidden = Boolean(ended || content);
  part(".trouble").hidden = !trouble;
  part(".what").textContent = trouble?.what ?? "";
  part(".why").textContent = trouble?.why ?? "";
  part(".trouble button").dataset.do = trouble?.retry ?? "regenerate";
  part(".tools").hidden = !ended || Boolean(trouble && !content);
  part(".tools [data-do=continue]").hidden = !content.trim() || !["length", "stopped"].includes(ended);
  part(".measures").textContent = ended ? measuresWords(measures ?? {}, ended) : "";
}

// A form to edit a question; the caller handles its `submit` and its Cancel button.
export function editElement(text, nDropped) {
  const form = fromTemplate("edit-template");
  const field = form.querySelector("textarea");
  field.value = text;
  if (nDropped) {
    const dropped = nDropped === 1 ? "the message" : `the ${nDropped} messages`;
    form.querySelector(".dropped").textContent = `Sending deletes ${dropped} below`;
  }
  growWithText(field);
  return form;
}

// Let a text area grow with its text, up to the height in page.css.
export function growWithText(field) {
  const grow = () => {
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
  };
  field.addEventListener("input", grow);
  requestAnimationFrame(grow);
}

const ENDINGS = {
  length: "cut off at the token limit",
  full: "cut off: the maximum length is reached",
  stopped: "stopped",
};

function measuresWords({ n_tokens, tokens_per_s, first_token_s }, ended) {
  return [
    n_tokens && `${count(n_tokens)} ${n_tokens === 1 ? "token" : "tokens"}`,
    tokens_per_s && `${decimal(tokens_per_s, 1)} tokens/s`,
    first_token_s && `first token after ${decimal(first_token_s, 2)} s`,
    ENDINGS[ended],
  ]
    .filter(Boolean)
    .join(" · ");
}
