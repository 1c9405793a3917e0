// What is chosen on the page, as commands and code to copy. A key is never written into them.

import { address } from "./api.js";

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** One command for each model. */
export function curl(models, question, settings, needsKey) {
  const key = needsKey ? ' \\\n  -H "Authorization: Bearer $API_KEY"' : "";
  return models
    .map((model) => {
      const body = { model, messages: [{ role: "user", content: question }], ...settings };
      return (
        `curl ${address("v1/chat/completions")} \\\n` +
        `  -H 'Content-Type: application/json'${key} \\\n` +
        `  -d ${shellQuoted(JSON.stringify(body))}`
      );
    })
    .join("\n\n");
}

/** One program that asks all models at the same time. A JSON string or number is a Python literal too. */
export function python(models, question, settings, needsKey) {
  const key = needsKey ? 'os.environ["API_KEY"]' : '"none"';
  return `${needsKey ? "import os\n" : ""}from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(address("v1"))}, api_key=${key})


def ask(model: str) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": ${JSON.stringify(question)}}],
        temperature=${settings.temperature},
        max_tokens=${settings.max_tokens},
    )
    return answer.choices[0].message.content


models = [${models.map((model) => JSON.stringify(model)).join(", ")}]
with ThreadPoolExecutor(len(models)) as threads:
    for model, text in zip(models, threads.map(ask, models)):
        print(f"{model}: {text}\\n")
`;
}
