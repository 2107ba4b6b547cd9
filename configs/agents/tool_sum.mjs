// The agent of tool_sum.py in Node, with nothing but what Node has built in.
const tools = [{
  type: "function",
  function: {
    name: "add",
    description: "The last digit of x + y.",
    parameters: {
      type: "object",
      properties: { x: { type: "integer" }, y: { type: "integer" } },
      required: ["x", "y"],
    },
  },
}];

async function ask(messages) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { Authorization: `Bearer ${process.env.OPENAI_API_KEY}`, "Content-Type": "application/json" },
    body: JSON.stringify({ model: "policy", messages, tools }),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

const messages = [{ role: "user", content: JSON.parse(process.env.AREAL_LIKE_ROW).prompt }];
for (let turn = 0; turn < 16; turn++) {
  const answer = await ask(messages);
  messages.push(answer);
  if (!answer.tool_calls) break;
  for (const call of answer.tool_calls) {
    const { x, y } = JSON.parse(call.function.arguments);
    const isSum = Number.isInteger(x) && Number.isInteger(y);
    messages.push({ role: "tool", tool_call_id: call.id, content: isSum ? String((x + y) % 10) : "?" });
  }
}
console.log(messages.at(-1).content);
