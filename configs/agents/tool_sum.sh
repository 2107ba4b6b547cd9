#!/usr/bin/env bash
# The agent of tool_sum.py with curl and jq.
set -euo pipefail

tools='[{"type": "function", "function": {"name": "add", "description": "The last digit of x + y.", "parameters": {
  "type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}}}]'
messages=$(jq -c '[{role: "user", content: .prompt}]' <<<"$AREAL_LIKE_ROW")
for _ in {1..16}; do
  answer=$(jq -nc --argjson m "$messages" --argjson t "$tools" '{model: "policy", messages: $m, tools: $t}' |
    curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
      -H "Content-Type: application/json" -d @- | jq -c '.choices[0].message')
  # The answer, and a result for each call in it.
  messages=$(jq -nc --argjson m "$messages" --argjson a "$answer" '$m + [$a] + [$a.tool_calls // [] | .[] | {
    role: "tool", tool_call_id: .id,
    content: (try (.function.arguments | fromjson | (.x + .y) % 10 | tostring) catch "?")}]')
  [[ $(jq -r '.[-1].role' <<<"$messages") == tool ]] || break
done
jq -r '.[-1].content' <<<"$messages"
