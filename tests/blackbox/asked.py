"""What is asked of the demo model, which can count, and little else."""

MODEL = "pipeinfer-demo"
QUESTION = "Count from 3 to 9."
COUNTED = "3 4 5 6 7 8 9"
USER = [{"role": "user", "content": QUESTION}]
ONE = {
    "type": "object",
    "properties": {"a": {"enum": [1]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": ONE}}
NAMED = {"type": "function", "function": {"name": "f"}}
CONTEXT = 2048
VOCABULARY = 264
END = 258  # the id that ends an answer


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def user(content: str | list) -> dict:
    return {"role": "user", "content": content}


def system(content: str | list) -> dict:
    return {"role": "system", "content": content}


def text(said: str) -> dict:
    return {"type": "text", "text": said}
