// Clients of other authors in JavaScript, unmodified: only address, key and model are given.
//   node clients.mjs CLIENT ADDRESS
// prints what the client got, as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [client, address] = process.argv.slice(2);
const baseURL = `http://${address}/v1`;
const inputSchema = z.object({ path: z.string(), line: z.number() });
const description = "Reads a line of a file.";
const calls = [];
const execute = (given) => {
  calls.push(given);
  return "nothing";
};
const LONG = "a".repeat(5000); // more than the model's 1,024 tokens

async function refusal(promise) {
  const error = await promise.then(() => null, (thrown) => thrown);
  return { status: error?.status, code: error?.code ?? error?.error?.error?.type, said: error?.message };
}

async function openai() {
  const api = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const ask = { model: "tiny", messages: [{ role: "user", content: "Read!" }] };
  const read = {
    type: "function",
    function: { name: "read", description, parameters: z.toJSONSchema(inputSchema), function: execute, parse: JSON.parse },
  };
  const runner = api.chat.completions.runTools({ ...ask, tools: [read] });
  const looped = await runner.finalContent();
  const stream = api.chat.completions.stream(ask);
  const streamed = await stream.finalContent();
  const answer = await api.responses.create({ model: "tiny", input: "Go on." });
  const long = await refusal(
    api.chat.completions.create({ ...ask, messages: [{ role: "user", content: LONG }] }),
  );
  const other = await refusal(api.chat.completions.create({ ...ask, model: "other" }));
  return { texts: [looped, streamed, answer.output_text], long, other };
}

async function anthropic() {
  const api = new Anthropic({ baseURL: `http://${address}`, apiKey: "none", maxRetries: 0 });
  const ask = { model: "tiny", max_tokens: 300, messages: [{ role: "user", content: "Read!" }] };
  const text = (message) => message.content.map((part) => part.text ?? "").join("");
  const read = betaZodTool({ name: "read", description, inputSchema, run: execute });
  const looped = text(await api.beta.messages.toolRunner({ ...ask, tools: [read] }));
  const streamed = await api.messages.stream(ask).finalText();
  const counted = await api.messages.countTokens({ model: "tiny", messages: ask.messages });
  const long = await refusal(
    api.messages.create({ ...ask, messages: [{ role: "user", content: LONG }] }),
  );
  return { texts: [looped, streamed], counted: counted.input_tokens, long };
}

async function aiSdk(model) {
  const read = tool({ description, inputSchema, execute });
  const ask = { model, maxRetries: 0 };
  const looped = await generateText({
    ...ask,
    prompt: "Read!",
    tools: { read },
    stopWhen: stepCountIs(3),
  });
  const stream = streamText({ ...ask, prompt: "Go on." });
  const streamed = await stream.text;
  const { object } = await generateObject({
    ...ask,
    prompt: "On?",
    schema: z.object({ on: z.boolean() }),
  });
  return { texts: [looped.text, streamed], object };
}

const compatible = createOpenAICompatible({
  name: "peagle",
  baseURL,
  supportsStructuredOutputs: true,
});
const CLIENTS = {
  openai,
  anthropic,
  "ai-compatible": () => aiSdk(compatible("tiny")),
  "ai-responses": () => aiSdk(createOpenAI({ baseURL, apiKey: "none" })("tiny")),
};
console.log(JSON.stringify({ ...(await CLIENTS[client]()), calls }));
