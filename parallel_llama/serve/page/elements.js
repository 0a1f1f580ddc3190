// Elements that several parts of the page use: copies of templates, lists, and the toast.

const TOAST_MS = 10_000;

const toast = document.getElementById("toast");
const toastText = toast.querySelector("span");
const undoButton = toast.querySelector("button");
let undoes = null;
let timer = 0;

// A copy of the element in a template of the page.
export function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

// Make the elements of a list match some items, in their order. The element of an item is kept by the
// item's `id`, so that it keeps focus, selection and input when other items change.
export function showItems(list, items, make, update) {
  const ids = new Set(items.map(({ id }) => id));
  for (const element of [...list.children]) {
    if (!ids.has(element.dataset.id)) element.remove();
  }
  const old = new Map([...list.children].map((element) => [element.dataset.id, element]));
  items.forEach((item, index) => {
    const element = old.get(item.id) ?? make(item);
    element.dataset.id = item.id;
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
    update(element, item);
  });
}

// Show a line for a few seconds, with a button if `undo` can revert what was done.
export function showToast(text, undo = null) {
  toastText.textContent = text;
  undoes = undo;
  undoButton.hidden = !undo;
  toast.hidden = false;
  hideToastLater();
}

// Not while the user is about to press the button.
function hideToastLater() {
  clearTimeout(timer);
  timer = setTimeout(() => (toast.matches(":hover, :focus-within") ? hideToastLater() : hideToast()), TOAST_MS);
}

function hideToast() {
  toast.hidden = true;
  undoes = null;
}

undoButton.addEventListener("click", () => {
  const undo = undoes;
  hideToast();
  undo?.();
});
