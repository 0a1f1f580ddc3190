// Renders LaTeX as MathML. KaTeX is loaded for the first formula; its MathML needs no styles and no
// fonts, so the Content-Security-Policy allows it.

import DOMPurify from "./vendor/purify.es.mjs";

const MAX_CHARS = 4000; // per formula; a longer one is shown as LaTeX
const MAX_FORMULAS = 200; // per paragraph

const OPTIONS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxExpand: 500, maxSize: 20 };

// Omits KaTeX's `class` attributes and the LaTeX source in `annotation`.
const ALLOWED = {
  ALLOWED_TAGS: [
    "math", "menclose", "mfrac", "mi", "mmultiscripts", "mn", "mo", "mover", "mpadded", "mphantom",
    "mroot", "mrow", "ms", "mspace", "msqrt", "mstyle", "msub", "msubsup", "msup", "mtable", "mtd",
    "mtext", "mtr", "munder", "munderover",
  ],
  ALLOWED_ATTR: [
    "accent", "accentunder", "columnalign", "depth", "display", "displaystyle", "fence", "height",
    "largeop", "linethickness", "lspace", "mathbackground", "mathcolor", "mathsize", "mathvariant",
    "maxsize", "minsize", "movablelimits", "notation", "rspace", "scriptlevel", "separator",
    "stretchy", "symmetric", "voffset", "width",
  ],
  FORBID_CONTENTS: ["annotation"],
  RETURN_DOM_FRAGMENT: true,
};

let katex = null;
let loading = null;

// Extensions of marked: inline formulas $..$ and \(..\), displayed formulas $$..$$ and \[..\]. No space
// is allowed inside the dollars and no digit after them, so that "$5 and $10" is not a formula.
export const formulaExtensions = [
  {
    name: "formulaBlock",
    level: "block",
    start: (text) => lineWith(text, "$$", "\\["),
    tokenizer: (text) =>
      token("formulaBlock", /^ {0,3}(?:\$\$([^]{1,4000}?)\$\$|\\\[([^]{1,4000}?)\\\])[ \t]*(?:\n|$)/.exec(text), true),
    renderer: (formula) => `<p>${written(formula)}</p>`,
  },
  {
    name: "formula",
    level: "inline",
    start: (text) => text.indexOf("$"),
    tokenizer: (text) =>
      token("formula", /^(?:\$\$((?:\\.|[^\\$]){1,4000}?)\$\$|\\\[([^]{1,4000}?)\\\])/.exec(text), true) ??
      token("formula", /^(?:\$(?!\s)((?:\\.|[^\\$\n]){0,4000}(?<!\s))\$(?!\d)|\\\(([^]{1,4000}?)\\\))/.exec(text), false),
    renderer: (formula) => written(formula),
  },
];

// The start of the first line after this one that begins with one of these marks.
function lineWith(text, ...marks) {
  const found = marks.map((mark) => text.indexOf(`\n${mark}`) + 1).filter(Boolean);
  return found.length ? Math.min(...found) : undefined;
}

function token(type, match, isDisplayed) {
  const text = (match?.[1] ?? match?.[2] ?? "").trim();
  return text ? { type, raw: match[0], text, isDisplayed } : undefined;
}

// The LaTeX source, until `showFormulas` replaces it by MathML.
function written({ raw, isDisplayed }) {
  const text = raw.trim().replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  return `<code class="${isDisplayed ? "formula displayed" : "formula"}">${text}</code>`;
}

// Replace the formulas of an element by MathML, after KaTeX has been loaded. Formulas that KaTeX cannot
// parse remain LaTeX.
export function showFormulas(element) {
  const formulas = [...element.querySelectorAll("code.formula")].slice(0, MAX_FORMULAS);
  if (!formulas.length) return;
  if (katex) formulas.forEach(show);
  else whenLoaded(() => formulas.forEach(show));
}

function whenLoaded(then) {
  loading ??= import("./vendor/katex.min.js").then(() => (katex = globalThis.katex));
  loading.then(then, () => (loading = null)); // the next formula tries again
}

function show(element) {
  const displayMode = element.classList.contains("displayed");
  const source = element.textContent.replace(/^(\$\$?|\\[([])|(\$\$?|\\[)\]])$/g, "");
  if (source.length > MAX_CHARS) return;
  let math;
  try {
    const html = katex.renderToString(source, { ...OPTIONS, displayMode });
    // The policy would report every `style` attribute, even one that DOMPurify removes.
    math = DOMPurify.sanitize(html.replaceAll(/ style="[^"]*"/g, ""), ALLOWED);
  } catch {
    return;
  }
  for (const table of math.querySelectorAll("mtable")) align(table);
  for (const box of math.querySelectorAll("menclose")) replaceEnclosure(box);
  const shown = document.createElement("span");
  shown.className = element.className;
  shown.append(math);
  element.replaceWith(shown);
}

// Browsers no longer support `columnalign` and `menclose`: set the equivalent styles.
function align(table) {
  const columns = (table.getAttribute("columnalign") ?? "").split(" ");
  for (const row of table.children) {
    const cells = [...row.children].filter((cell) => cell.hasChildNodes());
    cells.forEach((cell, index) => (cell.style.textAlign = columns[index] ?? "center"));
  }
}

function replaceEnclosure(enclosure) {
  const row = document.createElementNS(enclosure.namespaceURI, "mrow");
  if (enclosure.getAttribute("notation") === "box") row.setAttribute("class", "boxed");
  row.append(...enclosure.childNodes);
  enclosure.replaceWith(row);
}
