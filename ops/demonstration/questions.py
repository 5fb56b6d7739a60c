"""Jobs of the demonstration: chats of several tenants and priorities, so that tables have rows."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    tenant: str
    priority: str
    max_tokens: int = 72
    temperature: float = 0.0
    seed: int | None = None


QUESTIONS = (
    Question("Why is the sky blue?", "web", "interactive"),
    Question("Name three uses of a paper clip.", "web", "interactive", temperature=0.7, seed=7),
    Question(
        "Write two sentences about the sea at night.",
        "mobile",
        "standard",
        temperature=0.8,
        seed=11,
    ),
    Question("What is the capital of France, and what is it known for?", "mobile", "standard"),
    Question("Explain what a message queue does, to a child.", "reports", "bulk"),
    Question("Give me a short recipe for pancakes.", "reports", "bulk", temperature=0.7, seed=3),
)
