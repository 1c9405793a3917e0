// One column: a model's answer as it streams, its figures, and its error where it has one.

import { streamChat } from "./api.js";

const template = document.getElementById("column-template");

export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
export const perSecond = (tokens, ms) => {
  const rate = (tokens * 1000) / ms;
  return rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
};

const MIN_MEASURED_MS = 20; // in less, pieces came in one packet, and no rate can be told

const FINISHED = { stop: "complete", length: "cut at max tokens" };

/** What to do about an error, in a sentence; empty where its own message says it all. */
function advice(error) {
  if (error.status === 503) {
    const delay = /^\d+$/.test(error.retryAfter ?? "") ? `in ${error.retryAfter} s` : "in a few seconds";
    return `The server is starting, restarting or full: try again ${delay}.`;
  }
  if (error.status === 404) return "It may have been unloaded: reload the list above.";
  if (error.status === 401) return "Enter the key at the top of the page.";
  return "";
}

export class Column {
  /** `onChange` is called when the column has been drawn, `onRetry` when the user wants it asked again. */
  constructor(model, onChange, onRetry) {
    this.model = model;
    this.onChange = onChange;
    this.element = template.content.firstElementChild.cloneNode(true);
    const title = this.#find("h3");
    title.textContent = title.title = model;
    this.element.setAttribute("aria-label", `Answer of ${model}`);
    this.#find(".text").setAttribute("aria-label", `Text of ${model}`);
    this.#find("button").addEventListener("click", () => onRetry(this));
    this.#reset();
  }

  #find(selector) {
    return this.element.querySelector(selector);
  }

  #reset() {
    this.error = null;
    this.numTokens = 0;
    this.startedAt = this.firstAt = this.lastAt = null;
    this.text = document.createTextNode("");
    this.#find(".text").replaceChildren(this.text);
    this.pending = "";
    this.frame = null;
    this.#find(".problem").hidden = true;
    this.#state("waiting");
    this.#draw();
  }

  /** Ask, and show what comes until it ends, fails or is aborted; never throws for any of these. */
  async run(body, key, signal) {
    this.#reset();
    this.startedAt = performance.now();
    this.element.setAttribute("aria-busy", "true");
    let state = "complete";
    try {
      for await (const event of streamChat({ ...body, model: this.model }, key, signal)) {
        this.#take(event);
        if (event.finishReason) state = FINISHED[event.finishReason] ?? event.finishReason;
      }
    } catch (error) {
      state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) this.#fail(error);
    }
    this.element.setAttribute("aria-busy", "false");
    this.#state(state);
    this.#draw();
  }

  #take(event) {
    if (event.text) {
      const now = performance.now();
      if (this.firstAt === null) this.#state("answering");
      this.firstAt ??= now;
      this.lastAt = now;
      this.numTokens += 1; // a piece is nearly always a token; the server's own count comes last
      this.pending += event.text;
    }
    if (event.numTokens !== undefined) this.numTokens = event.numTokens;
    this.frame ??= requestAnimationFrame(() => this.#draw()); // drawing each token would slow what is measured
  }

  #draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    const box = this.#find(".text");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
    this.text.appendData(this.pending);
    this.pending = "";
    if (follows) box.scrollTop = box.scrollHeight;
    this.#figures();
    this.onChange(this);
  }

  #fail(error) {
    this.error = error;
    this.#find(".problem p").textContent = [error.told ?? String(error), advice(error)].filter(Boolean).join("\n");
    this.#find(".problem").hidden = false;
  }

  #state(state) {
    this.state = state;
    this.element.dataset.state = state;
    this.#find(".state").textContent = state;
  }

  #figures() {
    const set = (name, text) => (this.#find(`[data-figure=${name}]`).textContent = text);
    const decoding = this.lastAt - this.firstAt;
    set("first", this.firstAt === null ? "–" : seconds(this.firstAt - this.startedAt));
    set("rate", decoding >= MIN_MEASURED_MS && this.numTokens > 1 ? perSecond(this.numTokens - 1, decoding) : "–");
    set("tokens", this.numTokens || "–");
  }
}

/** All columns together in a sentence: tokens of all by the time from the first request to the last text. */
export function together(columns) {
  const answering = columns.filter((column) => column.firstAt !== null);
  if (!answering.length) return "";
  const tokens = answering.reduce((sum, column) => sum + column.numTokens, 0);
  const elapsed = Math.max(...answering.map((c) => c.lastAt)) - Math.min(...answering.map((c) => c.startedAt));
  const firsts = answering.map((column) => column.firstAt - column.startedAt);
  const [fastest, slowest] = [seconds(Math.min(...firsts)), seconds(Math.max(...firsts))];
  return [
    "All together",
    `${perSecond(tokens, elapsed)} tokens/s`,
    `${tokens.toLocaleString("en")} tokens in ${seconds(elapsed)}`,
    `first token ${fastest === slowest ? fastest : `${fastest} to ${slowest}`}`,
  ].join(" · ");
}
