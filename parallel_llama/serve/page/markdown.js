// A model's markdown as elements that run nothing and load nothing.
//
// Three fences, each enough alone: HTML in the text is shown as text, what marked makes of the rest
// goes through DOMPurify, and the page's Content-Security-Policy allows no script but its own files.

import { formulaExtensions, showFormulas } from "./formulas.js";
import { highlight } from "./highlight.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const SLOW_MS = 500;

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: formulaExtensions,
  renderer: {
    html: ({ text }) => escaped(text),
    // An image would be loaded from wherever the model says.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});

function escaped(text) {
  return text
    .replaceAll("&", "&amp;")
    .replaceAll("<", "&lt;")
    .replaceAll(">", "&gt;")
    .replaceAll('"', "&quot;");
}

// Show `text` in an element. Called again with a longer text, it replaces only the paragraphs, lists
// and so on that changed: the others keep the reader's selection, and cost nothing.
//
// Returns false where the text nests too deep to be parsed, or took so long that the page would soon
// stand still. Such a text is to be shown with `showPlain` from then on.
export function showMarkdown(element, text) {
  const started = performance.now();
  let blocks;
  try {
    blocks = blocksOf(text);
  } catch {
    return false;
  }
  const parsed = performance.now();
  const shown = (element.shownBlocks ??= []);
  const changed = blocks.findIndex((html, index) => html !== shown[index]);
  const from = changed < 0 ? blocks.length : changed;
  while (element.children.length > from) element.lastElementChild.remove();
  element.append(...blocks.slice(from).map(blockElement));
  element.shownBlocks = blocks;
  return parsed - started < SLOW_MS;
}

export function showPlain(element, text) {
  const block = document.createElement("div");
  block.className = "plain";
  block.textContent = text;
  element.replaceChildren(block);
  element.shownBlocks = [];
}

function blocksOf(text) {
  return marked
    .lexer(text)
    .map((token) => marked.parser([token]))
    .filter(Boolean);
}

function blockElement(html) {
  const block = document.createElement("div");
  block.append(DOMPurify.sanitize(html, ALLOWED));
  for (const table of block.querySelectorAll("table")) wrapped(table, "wide-table");
  for (const pre of block.querySelectorAll("pre")) addCodeHead(pre);
  showFormulas(block);
  return block;
}

function wrapped(element, className) {
  const wrap = document.createElement("div");
  wrap.className = className;
  element.replaceWith(wrap);
  wrap.append(element);
  return wrap;
}

function addCodeHead(pre) {
  const language = /language-(\S+)/.exec(pre.firstElementChild?.className)?.[1] ?? "";
  if (pre.firstElementChild) highlight(pre.firstElementChild, language);
  const figure = wrapped(pre, "code");
  const head = document.createElement("div");
  head.className = "code-head";
  const name = document.createElement("span");
  name.textContent = language;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", () => copy(pre.textContent, button, pre));
  head.append(name, button);
  figure.prepend(head);
}

// Put text on the clipboard, and say so on the button. Browsers allow it on secure origins alone:
// elsewhere the text's element is selected, for the reader's own copying.
export async function copy(text, button, element) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(element);
    button.textContent = "Selected";
  }
  setTimeout(() => (button.textContent = label), 1500);
}
