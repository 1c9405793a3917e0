// The page: choose models, ask them all at once, see their answers side by side.

import { listModels, trouble } from "./api.js";
import { Column, together } from "./column.js";
import * as snippets from "./snippets.js";

// A browser opens at most six connections to a server, so a seventh answer would wait and its figures would lie.
const MAX_COLUMNS = 6;
const FILTER_FROM = 12; // models from which on the list can be filtered
const MAX_EXAMPLES = 8;
const EXAMPLES = [
  "What is the moon?",
  "How do I bake bread?",
  "What is the capital of France?",
  "Explain photosynthesis in simple words.",
  "Tell me a short story.",
];

const $ = (id) => document.getElementById(id);
const ui = {
  models: $("models"),
  filter: $("filter"),
  question: $("question"),
  temperature: $("temperature"),
  maxTokens: $("max-tokens"),
  stop: $("stop"),
};

const state = {
  key: sessionStorage.getItem("lorry-key") ?? "",
  needsKey: false,
  cards: [],
  chosen: null, // a Set of model ids, once the list has come for the first time
  columns: [],
  run: null, // AbortController of the answers under way
};

const chosenIds = () => state.cards.map((card) => card.id).filter((id) => state.chosen.has(id));
const settings = () => ({ temperature: number(ui.temperature), max_tokens: number(ui.maxTokens) });
const number = (input) => Number(input.value === "" ? input.defaultValue : input.value);

function show(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

// Models

async function refresh() {
  const [health] = await Promise.all([trouble(), refreshModels()]);
  $("health").textContent = health ?? "ready";
  $("health").dataset.ok = health === null;
}

async function refreshModels() {
  try {
    state.cards = await listModels(state.key);
  } catch (error) {
    if (error.status === 401) askForKey();
    const told = `The list of models cannot be read.\n${error.told ?? error}`;
    show($("models-problem"), error.status === 401 ? "" : told); // 401: the field for the key says it
    return;
  }
  show($("models-problem"), "");
  $("key-form").hidden = true;
  state.needsKey = state.key !== "";
  state.chosen ??= new Set(state.cards.slice(0, MAX_COLUMNS).map((card) => card.id));
  showModels();
}

function showModels() {
  const wanted = ui.filter.value.trim().toLowerCase();
  const focused = document.activeElement?.dataset?.model;
  ui.filter.hidden = state.cards.length < FILTER_FROM;
  ui.models.replaceChildren(
    ...state.cards.filter((card) => !card.parent || card.id.toLowerCase().includes(wanted)).map(modelItem),
  );
  if (focused) ui.models.querySelector(`[data-model="${CSS.escape(focused)}"]`)?.focus();
  chosenChanged();
}

function modelItem(card) {
  const item = $("model-template").content.firstElementChild.cloneNode(true);
  const box = item.querySelector("input");
  box.checked = state.chosen.has(card.id);
  box.dataset.model = card.id;
  box.addEventListener("change", () => {
    state.chosen[box.checked ? "add" : "delete"](card.id);
    chosenChanged();
  });
  item.querySelector(".name").textContent = card.id;
  item.querySelector(".tag").textContent = card.parent ? (card.rank ? `rank ${card.rank}` : "adapter") : "base";
  item.querySelector(".about").textContent = card.description ?? "";
  item.title = card.root ?? "";
  return item;
}

function chosenChanged() {
  const num = chosenIds().length;
  $("num-chosen").textContent = state.cards.length ? `${num} of ${state.cards.length}` : "";
  for (const box of ui.models.querySelectorAll("input")) box.disabled = num >= MAX_COLUMNS && !box.checked;
  let note = "";
  if (state.cards.length === 1) {
    note = "No adapter is loaded. POST /v1/load_lora_adapter loads one while the server runs.";
  } else if (num >= MAX_COLUMNS && num < state.cards.length) {
    note = `${MAX_COLUMNS} at a time: a browser opens no more connections to one server.`;
  }
  show($("models-note"), note);
  showExamples();
  showSnippets();
}

function showExamples() {
  const own = state.cards.filter((card) => state.chosen.has(card.id)).flatMap((card) => {
    const texts = [card.examples ?? card.example ?? []].flat().filter((text) => typeof text === "string" && text);
    return texts.map((text) => ({ text, from: card.id }));
  });
  const examples = own.length ? own : EXAMPLES.map((text) => ({ text, from: "" }));
  $("examples").replaceChildren(...examples.slice(0, MAX_EXAMPLES).map(({ text, from }) => {
    const button = document.createElement("button");
    button.type = "button";
    if (from) {
      const name = document.createElement("b");
      name.textContent = from;
      button.append(name, " ");
    }
    button.append(text);
    button.addEventListener("click", () => {
      ui.question.value = text;
      ui.question.focus();
      questionChanged();
    });
    return button;
  }));
}

// The API key

function askForKey() {
  $("key-note").textContent = state.key ? "The server does not take this key." : "The server asks for a key.";
  state.needsKey = true;
  showSnippets();
  if (!$("key-form").hidden) return;
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.key = $("key").value.trim();
  sessionStorage.setItem("lorry-key", state.key); // for this tab, until it is closed
  refresh();
});

// Asking

function questionChanged() {
  const blank = ui.question.value !== "" && ui.question.value.trim() === "";
  ui.question.setCustomValidity(blank ? "Write a question first." : "");
  showSnippets();
}

async function ask() {
  const models = chosenIds();
  if (!models.length) {
    show($("models-problem"), "Choose at least one model.");
    ui.models.querySelector("input")?.focus();
    return;
  }
  show($("models-problem"), "");
  state.run?.abort();
  state.run = null;
  const body = { messages: [{ role: "user", content: ui.question.value }], ...settings() };
  state.columns = models.map((model) => new Column(model, columnChanged, (column) => runColumns([column], body)));
  $("columns").replaceChildren(...state.columns.map((column) => column.element));
  $("answers").hidden = false;
  $("together").textContent = "";
  $("answers").scrollIntoView({ block: "nearest" });
  await runColumns(state.columns, body);
}

/** Ask these columns at the same time. A retry joins the run under way, if there is one. */
async function runColumns(columns, body) {
  const run = state.run ?? new AbortController();
  state.run = run;
  ui.stop.disabled = false;
  announce(`Asking ${columns.map((column) => column.model).join(", ")}`);
  await Promise.all(columns.map((column) => column.run(body, state.key, run.signal)));
  if (columns.some((column) => column.error?.status === 401)) askForKey();
  const busy = state.columns.some((column) => column.element.getAttribute("aria-busy") === "true");
  if (state.run !== run || busy) return;
  state.run = null;
  ui.stop.disabled = true;
  announce(columns.map((column) => `${column.model}: ${column.state}`).join(", "));
}

function columnChanged() {
  $("together").textContent = together(state.columns);
}

function stop() {
  if (!state.run) return;
  state.run.abort();
  ui.question.focus();
}

function announce(text) {
  $("announcer").textContent = text;
}

// Snippets

function showSnippets() {
  const models = state.chosen ? chosenIds() : [];
  const question = ui.question.value || EXAMPLES[0];
  for (const language of ["curl", "python"]) {
    $(language).textContent = models.length
      ? snippets[language](models, question, settings(), state.needsKey)
      : "Choose at least one model.";
  }
}

async function copy(button) {
  const source = $(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source); // no clipboard without https: the user's own copy key has it
    button.textContent = "Selected";
  }
  announce(button.textContent);
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Events

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
$("ask").addEventListener("input", questionChanged);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  if (event.key === "Escape") stop();
});
ui.stop.addEventListener("click", stop);
ui.filter.addEventListener("input", showModels);
$("reload").addEventListener("click", refresh);
window.addEventListener("focus", () => state.run || refresh()); // adapters come and go while the server runs
for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
refresh();
