// Values that survive a reload, stored in this browser only.
//
// If the browser refuses storage, or has none left, the page works without it.

const PREFIX = "parallel_llama.";

export function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

// Returns whether the browser has stored the value.
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

// The stored names that begin with `start`.
export function names(start) {
  try {
    const all = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX + start));
    return all.map((key) => key.slice(PREFIX.length));
  } catch {
    return [];
  }
}

// Calls `onChange(name)` when another tab has changed or removed a value.
export function onChangeElsewhere(onChange) {
  addEventListener("storage", ({ key, storageArea }) => {
    if (key?.startsWith(PREFIX) && storageArea === localStorage) onChange(key.slice(PREFIX.length));
  });
}

// Values of this tab only; a duplicated tab starts with a copy of them.
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
    // The value is lost on reload.
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
