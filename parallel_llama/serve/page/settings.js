// The user's settings, and their dialog.

import { load, save } from "./stored.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

// Max tokens of an answer if the user has set no limit; "Continue" adds as many again.
const DEFAULT_MAX_TOKENS = 1024;
const WITHOUT_DEFAULT = { max_tokens: DEFAULT_MAX_TOKENS, seed: "random" };

export class Settings {
  constructor(dialog) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    this.restore();
    this.showDefaults({});
    this.form.addEventListener("input", () => {
      this.showFaults();
      this.save();
    });
    // Esc must not close the dialog while a field is invalid: its message would be lost.
    dialog.addEventListener("cancel", (event) => {
      if (!this.form.reportValidity()) event.preventDefault();
    });
    // Browsers close the dialog at a second Esc anyway.
    dialog.addEventListener("close", () => this.form.checkValidity() || this.restore());
  }

  restore() {
    const stored = load("settings", {});
    for (const name of ["system", ...NUMBERS]) this.field(name).value = stored[name] ?? "";
    this.showFaults();
  }

  // Show a message beside each field with an invalid value.
  showFaults() {
    for (const name of NUMBERS) {
      const field = this.field(name);
      const words = fault(field);
      field.ariaInvalid = words ? "true" : null;
      const element = document.getElementById(field.getAttribute("aria-describedby"));
      if (element.textContent !== words) element.textContent = words;
    }
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  get system() {
    return this.field("system").value.trim();
  }

  // The sampling parameters of a request: those that the user has set, and max_tokens.
  get sampling() {
    const given = NUMBERS.filter((name) => this.field(name).value !== "" && this.field(name).validity.valid);
    const values = given.map((name) => [name, this.field(name).valueAsNumber]);
    return { max_tokens: DEFAULT_MAX_TOKENS, ...Object.fromEntries(values) };
  }

  showDefaults(defaults) {
    for (const name of NUMBERS) {
      this.field(name).placeholder = defaults[name] ?? WITHOUT_DEFAULT[name] ?? "model default";
    }
  }

  reset() {
    for (const name of ["system", ...NUMBERS]) this.field(name).value = "";
    this.showFaults();
    this.save();
  }

  save() {
    const fields = ["system", ...NUMBERS].map((name) => this.field(name));
    const set = fields.filter((field) => field.value !== "" && field.validity.valid);
    save("settings", Object.fromEntries(set.map((field) => [field.name, field.value])));
  }
}

// Why the value of a number field is invalid, or "".
function fault({ validity, min, max, step }) {
  if (validity.valid) return "";
  const kind = step === "1" ? "a whole number" : "a number";
  const bounds = max ? `from ${Number(min).toLocaleString("en")} to ${Number(max).toLocaleString("en")}` : `of at least ${min}`;
  return `Must be ${kind} ${bounds}.`;
}
