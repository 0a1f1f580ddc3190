// One conversation: its title and its turns.
//
// A turn is {id, at, version, question, answer}: `at` is when it was asked, `version` counts the
// changes, `question` is a string. An answer is {content} and, once it has ended, `ended` ("stop",
// "length", "full" at the maximum length, "stopped" by the user, or "failed"), `trouble` if it
// failed, and `measures`. It is `plain` if its Markdown cannot be rendered.
//
// Several tabs may change a conversation at once. `merge` gives the same result in any order and any
// number of times: the turns of both states without those that either has removed.

const TITLE_CHARS = 80;
const IDS = /^[\w-]{1,40}$/;

export function newId() {
  return [...crypto.getRandomValues(new Uint32Array(2))].map((part) => part.toString(36)).join("-");
}

export class Conversation {
  constructor({ id = newId(), used = 0, name = "", named = 0, turns = [], removed = [] } = {}) {
    Object.assign(this, { id, used, name, named, turns, removed });
  }

  get title() {
    const first = this.turns[0]?.question.trim().split("\n")[0] ?? "";
    return this.name || first.slice(0, TITLE_CHARS) || "New chat";
  }

  rename(name) {
    this.name = name.trim();
    this.named = Date.now();
  }

  // Replace the turns from an index on by a new turn. Returns the new turn.
  ask(question, at = this.turns.length) {
    this.removed.push(...this.turns.splice(at).map((turn) => turn.id));
    // The clock may have been set back.
    const now = Math.max(Date.now(), (this.turns.at(-1)?.at ?? 0) + 1);
    const turn = { id: newId(), at: now, version: 0, question, answer: { content: "" } };
    this.turns.push(turn);
    this.touch(turn);
    return turn;
  }

  // Call this after each change of a turn.
  touch(turn) {
    turn.version += 1;
    this.used = Date.now();
  }

  // Merge another state into this one. Returns whether the other state lacks something of this one.
  merge(other) {
    const theirs = new Map(other.turns.map((turn) => [turn.id, turn]));
    const gone = new Set([...this.removed, ...other.removed]);
    const lacks =
      gone.size > other.removed.length ||
      this.named > other.named ||
      this.turns.some((turn) => !gone.has(turn.id) && isNewer(turn, theirs.get(turn.id)));
    for (const turn of this.turns) {
      const their = theirs.get(turn.id);
      if (their && isNewer(their, turn)) Object.assign(turn, their);
      theirs.delete(turn.id);
    }
    this.turns = [...this.turns, ...theirs.values()].filter((turn) => !gone.has(turn.id));
    this.turns.sort((a, b) => a.at - b.at || (a.id < b.id ? -1 : 1));
    this.removed = [...gone];
    if (other.named > this.named) [this.name, this.named] = [other.name, other.named];
    this.used = Math.max(this.used, other.used);
    return lacks;
  }

  // The messages of a request: the turns before an index, then a question. Questions without an answer
  // are omitted, because chat templates require alternating roles.
  messages(system, at, question) {
    const answered = this.turns.slice(0, at).filter((turn) => turn.answer.content);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...answered.flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.answer.content },
      ]),
      { role: "user", content: question },
    ];
  }
}

// If two tabs have created the same version, the longer answer wins in both.
function isNewer(turn, other) {
  if (!other || turn.version !== other.version) return turn.version > (other?.version ?? 0);
  const [a, b] = [turn.answer.content, other.answer.content];
  return a.length === b.length ? a > b : a.length > b.length;
}

// The conversation of a stored or imported record; null if the record is invalid.
export function conversationOf(record) {
  const { id, used, name = "", named = 0, turns, removed = [] } = record ?? {};
  const isOne =
    IDS.test(id) &&
    [used, named].every(Number.isFinite) &&
    typeof name === "string" &&
    Array.isArray(turns) &&
    turns.every(isTurn) &&
    Array.isArray(removed) &&
    removed.every((each) => IDS.test(each));
  return isOne ? new Conversation({ id, used, name, named, turns, removed }) : null;
}

function isTurn(turn) {
  return (
    IDS.test(turn?.id) &&
    [turn.at, turn.version].every(Number.isFinite) &&
    typeof turn.question === "string" &&
    typeof turn.answer?.content === "string" &&
    ["undefined", "string"].includes(typeof turn.answer.reasoning) &&
    Object.values(turn.answer.measures ?? {}).every((value) => value === null || Number.isFinite(value))
  );
}

// The conversation in the single record of earlier versions of this page: a list of messages.
export function conversationOfMessages(messages) {
  const conversation = new Conversation({ id: "first", used: Date.now() });
  for (const { role, content, ...rest } of Array.isArray(messages) ? messages : []) {
    if (typeof content !== "string") continue;
    const at = conversation.turns.length;
    if (role === "user") {
      conversation.turns.push({ id: `first-${at}`, at, version: 1, question: content, answer: { content: "" } });
    } else if (at) {
      conversation.turns[at - 1].answer = { ended: "stopped", ...rest, content };
    }
  }
  return conversation;
}
