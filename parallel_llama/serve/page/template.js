// A copy of the element in one of the page's templates.
export function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

// Make a list's elements those of some items, in their order. Each stays that of the item with its
// `id`, so that focus, selection and what is half written in it outlast a change of others.
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
