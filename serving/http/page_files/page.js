// The page: reads the form, streams answers, and runs the race.

import { Api } from "./api.js";
import { Charts } from "./charts.js";
import { find, make, plural, say } from "./dom.js";
import { Run } from "./run.js";

const REPLAY_MS = 90; // of a round in the replay
const STATES = {
  serving: "ready",
  starting: "starts: weights load and programs compile",
  draining: "shuts down",
  stopped: "has stopped",
  dead: "failed; its log says why",
  unreachable: "does not answer",
};
const ROUNDS_NOTE =
  "A round is one pass of the target. Times would mislead: here a request with K = 0 runs in rounds made for drafts.";
const METHODS = { peagle: "P-EAGLE", eagle3: "EAGLE-3" };
const ENDS = {
  stop: "ended by the model",
  length: "reached its limit of tokens",
  abort: "was aborted",
};

const api = new Api(askToken);
let model = null;
let stopper = null;

function askToken(isWrong) {
  const dialog = find("#token-dialog");
  const input = find("#token");
  if (isWrong) find("#token-note").textContent = "The server does not know this token. Try another one.";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    const close = () => resolve(dialog.returnValue === "use" && input.value ? input.value.trim() : null);
    dialog.addEventListener("close", close, { once: true });
  });
}

function showState(state) {
  const element = find("#state");
  element.textContent = STATES[state] ?? state;
  element.dataset.state = state;
}

// Reads the model's name and limits; the form then allows what the server allows.
async function meet() {
  const models = await api.json("../v1/models");
  model = models.data[0];
  const most = model.num_speculative_tokens;
  find("#model").textContent = `${model.id}, up to ${model.max_model_len} tokens`;
  limit(find("#max-tokens"), model.max_model_len);
  limit(find("#drafts"), most);
  find("#drafts").disabled = most === 0;
  find("#race").hidden = most === 0;
}

function limit(field, most) {
  field.max = most;
  field.value = Math.min(field.value, most);
}

function readForm() {
  return {
    isChat: find('input[name="mode"]:checked').value === "chat",
    prompt: find("#prompt").value,
    drafts: find("#drafts").valueAsNumber,
    temperature: find("#temperature").valueAsNumber,
    maxTokens: find("#max-tokens").valueAsNumber,
  };
}

function bodyOf(asked, changes) {
  const prompt = asked.isChat
    ? { messages: [{ role: "user", content: asked.prompt }] }
    : { prompt: asked.prompt };
  return {
    model: model.id,
    ...prompt,
    max_tokens: asked.maxTokens,
    temperature: asked.temperature,
    num_speculative_tokens: asked.drafts,
    stream: true,
    stream_options: { include_usage: true },
    return_rounds: true,
    ...changes,
  };
}

// Streams one answer into `run`.
async function stream(run, asked, changes = {}) {
  const path = asked.isChat ? "../v1/chat/completions" : "../v1/completions";
  let usage = null;
  let reason = "ended";
  try {
    for await (const event of api.events(path, bodyOf(asked, changes), stopper.signal)) {
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        run.add(choice.rounds ?? []);
        reason = ENDS[choice.finish_reason] ?? reason;
      }
    }
    run.finish(usage, reason);
  } catch (error) {
    run.finish(usage, error.name === "AbortError" ? "stopped by you" : "failed");
    throw error;
  }
}

// Runs `work` with the buttons set for it, and shows what goes wrong.
async function busy(work) {
  stopper = new AbortController();
  setBusy(true);
  say(find("#problem"), "");
  say(find("#verdict"), "");
  try {
    if (model === null) await meet();
    await work(readForm());
  } catch (error) {
    if (error.name !== "AbortError") say(find("#problem"), error.message);
  } finally {
    setBusy(false);
  }
}

function setBusy(isBusy) {
  document.body.dataset.busy = isBusy;
  find("#run").disabled = isBusy;
  find("#race").disabled = isBusy;
  find("#stop").hidden = !isBusy;
}

function showRuns(...runs) {
  const place = find("#runs");
  place.dataset.count = runs.length;
  place.replaceChildren(...runs.map((run) => run.element));
}

// What decodes with K drafts per round, as a title. K is a number, or a text of one or two.
function nameOf(drafts) {
  const isPlain = String(drafts) === "0";
  return isPlain ? "Plain, K = 0" : `${METHODS[model.method] ?? "Drafts"}, K = ${drafts}`;
}

async function generate(asked) {
  const run = new Run(nameOf, asked.drafts, asked.isChat ? "" : asked.prompt);
  showRuns(run);
  await stream(run, asked);
}

// Decodes greedily without drafts, then with them: only greedy texts must be equal.
async function race(asked) {
  const drafts = asked.drafts || Number(find("#drafts").max);
  const shown = asked.isChat ? "" : asked.prompt;
  const plain = new Run(nameOf, 0, shown, { isTimed: false });
  const drafted = new Run(nameOf, drafts, shown, { isTimed: false });
  drafted.say("waits for the other one");
  showRuns(plain, drafted);
  try {
    await stream(plain, asked, { temperature: 0, num_speculative_tokens: 0 });
  } catch (error) {
    drafted.say("not started");
    throw error;
  }
  drafted.begin();
  await stream(drafted, asked, { temperature: 0, num_speculative_tokens: drafts });
  judge(plain, drafted);
}

function judge(plain, drafted) {
  const verdict = find("#verdict");
  const isEqual = plain.text === drafted.text && plain.counts.tokens === drafted.counts.tokens;
  verdict.dataset.equal = isEqual;
  if (!isEqual) {
    const length = commonLength(plain.text, drafted.text);
    say(verdict, `Different texts: they part after ${length} characters.`);
    return;
  }
  const [slow, fast] = [plain.counts.rounds, drafted.counts.rounds];
  const times = fast ? `: ${(slow / fast).toFixed(2)} times fewer` : "";
  const { tokens } = plain.counts;
  const rounds = `${plural(slow, "round")} without drafts and ${fast} with them`;
  say(verdict, `Equal text. ${plural(tokens, "token")} took ${rounds}${times}.`);
  const button = make("button", "", "Replay by rounds");
  button.type = "button";
  button.addEventListener("click", () => replay(plain, drafted));
  verdict.append(" ", button, make("span", "note", ROUNDS_NOTE));
}

function commonLength(a, b) {
  let length = 0;
  while (length < Math.min(a.length, b.length) && a[length] === b[length]) length += 1;
  return length;
}

// Shows both answers again, a round of each at a time.
function replay(...runs) {
  const most = Math.max(...runs.map((run) => run.numEntries));
  let count = 0;
  const step = () => {
    count += 1;
    runs.forEach((run) => run.showUntil(count));
    if (count < most && runs[0].element.isConnected) setTimeout(step, REPLAY_MS);
  };
  step();
}

function listen() {
  find("#ask").addEventListener("submit", (event) => {
    event.preventDefault();
    busy(generate);
  });
  find("#race").addEventListener("click", () => {
    if (find("#ask").reportValidity()) busy(race);
  });
  find("#token-cancel").addEventListener("click", () => find("#token-dialog").close(""));
  find("#stop").addEventListener("click", () => stopper.abort());
  find("#prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("#ask").requestSubmit();
  });
}

listen();
new Charts(api, showState).start();
meet().catch((error) => say(find("#problem"), error.message));
