// Renders a model's Markdown as elements that cannot run scripts or load resources.
//
// Three defences, each sufficient: HTML in the text is escaped, marked's output is sanitised by
// DOMPurify, and the Content-Security-Policy allows only the page's own scripts. highlight.js is
// loaded for the first code block with a language.

import { formulaExtensions, showFormulas } from "./formulas.js";
import { Marked } from "./vendor/marked.esm.js";
import DOMPurify from "./vendor/purify.es.mjs";

const SLOW_MS = 500;
const MAX_CODE_CHARS = 20_000; // longer code is not highlighted, because each new piece highlights it again
const ALLOWED_IN_CODE = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

let highlighter = null;
let loadingHighlighter = null;

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: formulaExtensions,
  renderer: {
    html: ({ text }) => escaped(text),
    // A link, because the model chooses where an image would be loaded from.
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

// Show `text` in an element. Another call with a longer text replaces only the blocks that changed, so
// that the others keep the user's selection and cost nothing.
//
// Returns false if the text nests too deeply to be parsed, or parsing was so slow that the page would
// soon freeze. Then use `showPlain` for this text.
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

// Highlight the code of an element, after highlight.js has been loaded.
function highlight(element, language) {
  if (!language || element.textContent.length > MAX_CODE_CHARS) return;
  if (highlighter) {
    colour(element, language);
    return;
  }
  loadingHighlighter ??= import("./vendor/highlight.min.js").then((module) => (highlighter = module.default));
  loadingHighlighter.then(
    () => colour(element, language),
    () => (loadingHighlighter = null), // the next code block tries again
  );
}

function colour(element, language) {
  if (!highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(element.textContent, { language, ignoreIllegals: true });
  element.replaceChildren(DOMPurify.sanitize(value, ALLOWED_IN_CODE));
}

// Copy text to the clipboard, and say so on the button. Browsers allow it on secure origins only;
// elsewhere the text's element is selected for the user to copy.
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
