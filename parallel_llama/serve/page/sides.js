// The columns beside the conversation: chats on the left, ranks on the right. In a narrow window each
// is a drawer that covers the page.

import { load, save } from "./stored.js";

const drawer = matchMedia("(max-width: 70rem)"); // as in page.css

export class Sides {
  // `sides`: {name: {element, toggle, close}}, the columns and their buttons. `covered`: the parts of
  // the page that an open drawer covers.
  constructor(sides, covered, backdrop) {
    Object.assign(this, { sides, covered, backdrop });
    for (const [name, { toggle, close }] of Object.entries(sides)) {
      for (const button of [toggle, close]) button.addEventListener("click", () => this.toggle(name));
    }
    backdrop.addEventListener("click", () => this.closeDrawer());
    const placeAll = () => Object.keys(sides).forEach((name) => this.place(name));
    drawer.addEventListener("change", placeAll);
    placeAll();
  }

  // Restores the column's state in a wide window. A column whose button is hidden stays hidden.
  place(name) {
    this.open(name, !this.sides[name].toggle.hidden && !drawer.matches && load(name, true));
  }

  open(name, open) {
    const { element, toggle } = this.sides[name];
    element.hidden = !open;
    toggle.ariaExpanded = String(open);
    const covers = drawer.matches && this.openName !== undefined;
    this.backdrop.hidden = !covers;
    for (const part of this.covered) part.inert = covers;
  }

  get openName() {
    return Object.keys(this.sides).find((name) => !this.sides[name].element.hidden);
  }

  toggle(name) {
    const { element, toggle, close } = this.sides[name];
    const open = element.hidden;
    if (!drawer.matches) save(name, open);
    this.open(name, open);
    // In a wide window the same button opens and closes a column.
    (open && drawer.matches ? close : toggle).focus();
  }

  // Returns whether a drawer was open.
  closeDrawer() {
    const name = drawer.matches ? this.openName : undefined;
    if (name) this.toggle(name);
    return Boolean(name);
  }
}
