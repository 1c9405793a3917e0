// The server's API as the page uses it: models, health, and an answer that streams.

/** What the server, or the way to it, says is wrong. `status` is 0 where there was no HTTP answer. */
export class ApiError extends Error {
  constructor(status, message, code = null, retryAfter = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }

  /** The message with its status, for people. */
  get told() {
    return this.status ? `${this.status}: ${this.message}` : this.message;
  }
}

/** The absolute address of a path of the API; the page may be served below a prefix. */
export const address = (path) => new URL(path, document.baseURI).href;

async function request(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // not JSON: a proxy's answer, perhaps; the status has to do
  }
  const error = body.error ?? {};
  const message = error.message || body.reason || response.statusText || "The server gives no reason.";
  return new ApiError(response.status, message, error.code, response.headers.get("Retry-After"));
}

/** The cards of /v1/models: the base, then its adapters. */
export async function listModels(key) {
  const { data } = await (await request("v1/models", key)).json();
  return [...data.filter((card) => !card.parent), ...data.filter((card) => card.parent)];
}

/** Null where the server takes requests, else why it does not. */
export async function trouble() {
  try {
    await request("health");
    return null;
  } catch (error) {
    return error.message;
  }
}

/** Events of one answer: {text} as it comes, {finishReason} and {numTokens} at the end. Throws `ApiError`. */
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let complete = false;
  for await (const data of serverEvents(response.body)) {
    if (data === "[DONE]") {
      complete = true; // what is left is the end of the response; reading it keeps the connection for the next one
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code === "engine_unavailable" ? 503 : 500, chunk.error.message);
    const choice = chunk.choices[0];
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finishReason: choice.finish_reason };
    if (chunk.usage) yield { numTokens: chunk.usage.completion_tokens };
  }
  if (!complete) throw new ApiError(0, "The connection ended before the answer was complete.");
}

/** The `data` of server-sent events, wherever the network cuts them. */
async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      const lines = buffer.split("\n");
      buffer = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
