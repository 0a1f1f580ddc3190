// Code in colours. highlight.js is loaded with the first code whose language is named.

import DOMPurify from "./vendor/purify.es.mjs";

const MAX_CHARS = 20_000; // of code that is coloured anew each time it grows
const ALLOWED = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

let highlighter = null;
let loading = null;

// Colour the code of an element: at once where highlight.js is there, otherwise when it has come.
export function highlight(element, language) {
  if (!language || element.textContent.length > MAX_CHARS) return;
  if (highlighter) {
    colour(element, language);
    return;
  }
  loading ??= import("./vendor/highlight.min.js").then((module) => (highlighter = module.default));
  loading.then(
    () => colour(element, language),
    () => (loading = null), // the next code asks again
  );
}

function colour(element, language) {
  if (!highlighter.getLanguage(language)) return;
  const { value } = highlighter.highlight(element.textContent, { language, ignoreIllegals: true });
  element.replaceChildren(DOMPurify.sanitize(value, ALLOWED));
}
