// A line that says what was done, and takes it back for some seconds.

const SHOWN_MS = 10_000;

const toast = document.getElementById("toast");
const words = toast.querySelector("span");
const button = toast.querySelector("button");
let undoes = null;
let timer = 0;

export function showToast(text, undo = null) {
  words.textContent = text;
  undoes = undo;
  button.hidden = !undo;
  toast.hidden = false;
  hideLater();
}

// Not while the reader is about to press the button.
function hideLater() {
  clearTimeout(timer);
  timer = setTimeout(() => (toast.matches(":hover, :focus-within") ? hideLater() : hide()), SHOWN_MS);
}

function hide() {
  toast.hidden = true;
  undoes = null;
}

button.addEventListener("click", () => {
  const undo = undoes;
  hide();
  undo?.();
});
