// What outlasts a reload, in this browser alone.
//
// A browser may refuse storage, or have no more of it. The page then works without.

const PREFIX = "parallel_llama.";

export function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// Returns whether the browser has kept the value.
export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export function remove(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // Nothing was stored then.
  }
}

// The names that begin with `start`.
export function names(start) {
  try {
    const all = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + start));
    return all.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

// Calls `hear(name)` when another tab has changed or removed a value.
export function onChangeElsewhere(hear) {
  addEventListener("storage", ({ key, storageArea }) => {
    if (key?.startsWith(PREFIX) && storageArea === localStorage) hear(key.slice(PREFIX.length));
  });
}

// The same for this tab alone; a duplicate of the tab begins with a copy.
export function loadOfTab(name) {
  try {
    return sessionStorage.getItem(PREFIX + name);
  } catch {
    return null;
  }
}

export function saveOfTab(name, text) {
  try {
    sessionStorage.setItem(PREFIX + name, text);
  } catch {
    // The tab begins anew after a reload.
  }
}

export function forgetAll() {
  for (const name of names("")) remove(name);
  try {
    sessionStorage.clear();
  } catch {
    // Nothing was stored then.
  }
}
