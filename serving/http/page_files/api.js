// Requests to the server: bearer token, errors in plain words, streams of server-sent events.

const KEY = "peagle-token";
const NEEDS_TOKEN = "This server needs a token that it knows.";

class Refusal extends Error {
  // status: the HTTP status, or 0 if there was no answer.
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  // askToken: opens a dialog; resolves to a token, or to null if the user gave none.
  constructor(askToken) {
    this._askToken = askToken;
    this._asking = null;
    this._refused = undefined; // the token, or null, with which the server last answered 401
  }

  async json(path) {
    return (await this._send(path)).json();
  }

  // Without asking for a token: for requests that the page repeats by itself.
  async textQuietly(path) {
    return (await this._send(path, {}, true)).text();
  }

  // The server's state: "serving", "starting", "draining", "dead".
  async state() {
    const response = await connect("../health", {});
    return (await response.json()).status;
  }

  // The events of an answer, as objects.
  async *events(path, body, signal) {
    const response = await this._send(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const data of dataOf(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(response.status, event.error.message);
      yield event;
    }
  }

  async _send(path, options = {}, isQuiet = false) {
    for (;;) {
      const token = sessionStorage.getItem(KEY);
      if (isQuiet && token === this._refused) throw new Refusal(401, NEEDS_TOKEN);
      const own = token === null ? {} : { authorization: `Bearer ${token}` };
      const headers = { ...options.headers, ...own };
      const response = await connect(path, { ...options, headers });
      if (response.ok) return response;
      if (response.status === 401) this._refused = token;
      if (response.status === 401 && !isQuiet && (await this._renew(token))) continue;
      throw new Refusal(response.status, await reason(response));
    }
  }

  // Whether there is another token than `used`. Requests that wait for one share a dialog.
  async _renew(used) {
    if (sessionStorage.getItem(KEY) !== used) return true;
    this._asking ??= this._askToken(used !== null).finally(() => (this._asking = null));
    const token = await this._asking;
    if (token === null) return false;
    sessionStorage.setItem(KEY, token);
    return true;
  }
}

async function connect(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server does not answer. Check that it runs and can be reached.");
  }
}

async function reason(response) {
  if (response.status === 401) return NEEDS_TOKEN;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    message = `The server answered with status ${response.status}.`;
  }
  const seconds = response.headers.get("retry-after");
  return seconds === null ? message : `${message} (try again in ${seconds} s)`;
}

// The data of each event in a stream of bytes.
async function* dataOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) yield block.replace(/^data: /, "");
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
