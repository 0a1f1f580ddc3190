// The settings a reader has made, and the dialog that holds them.

import { load, save } from "./stored.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const WITHOUT_DEFAULT = { max_tokens: "to the end", seed: "random" };

export class Settings {
  constructor(dialog) {
    this.dialog = dialog;
    this.form = dialog.querySelector("form");
    const stored = load("settings", {});
    for (const name of ["system", ...NUMBERS]) this.field(name).value = stored[name] ?? "";
    this.showDefaults({});
    this.form.addEventListener("input", () => this.save());
    // A field with a wrong value keeps the dialog open, and Esc would lose its message.
    dialog.addEventListener("cancel", (event) => {
      if (!this.form.reportValidity()) event.preventDefault();
    });
  }

  field(name) {
    return this.form.elements.namedItem(name);
  }

  get system() {
    return this.field("system").value.trim();
  }

  // The sampling parameters of a request: those that the reader has set.
  get sampling() {
    const given = NUMBERS.filter((name) => this.field(name).value !== "" && this.field(name).validity.valid);
    return Object.fromEntries(given.map((name) => [name, this.field(name).valueAsNumber]));
  }

  showDefaults(defaults) {
    for (const name of NUMBERS) {
      this.field(name).placeholder = defaults[name] ?? WITHOUT_DEFAULT[name] ?? "model’s own";
    }
  }

  reset() {
    for (const name of ["system", ...NUMBERS]) this.field(name).value = "";
    this.save();
  }

  save() {
    const values = ["system", ...NUMBERS].map((name) => [name, this.field(name).value]);
    save("settings", Object.fromEntries(values.filter(([, value]) => value !== "")));
  }
}
