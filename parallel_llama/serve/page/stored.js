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

export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // The page goes on with what it holds.
  }
}

export function forgetAll() {
  try {
    for (const key of Object.keys(localStorage)) {
      if (key.startsWith(PREFIX)) localStorage.removeItem(key);
    }
  } catch {
    // Nothing was stored then.
  }
}
