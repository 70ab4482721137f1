"""Finds what the model must generate in the text that a chat template renders: each answer with its end mark."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatrain_ray.errors import ConfigError
from megatrain_ray.io.chat.answer_texts import (
    AnsweredTurn,
    LearnedRange,
    MarkedText,
    Notes,
    Range,
    common_length,
    join_touching,
    merge_turns,
    turns_in_windows,
    without,
)
from megatrain_ray.io.chat.chat_template import ChatTemplate, Message, TemplateRefusalError
from megatrain_ray.io.chat.messages import (
    PROBE,
    THOUGHT,
    Conversation,
    Written,
    empty_thought,
    is_written,
    missing_parts,
    parts_of,
    probed_thought,
    squeeze,
    thought_range,
    without_opened_thought,
)
from megatrain_ray.io.chat.template_ending import QUESTION, Surroundings, find_surroundings
from megatrain_ray.io.chat.template_variants import in_any_variant
from megatrain_ray.io.images.image_parts import IMAGE
from megatrain_ray.io.records.read_records import RecordError, RecordOutcome

MANY_ANSWERS = 32  # of a conversation that is rendered in windows, if its template allows that
TURN_CHARS = 200  # of text take about as long to render as what a template does in each turn
MOST_RENDERED = 1 << 31  # characters, twice those that are rendered: some minutes, for 4,000 short turns


class TurnMarker:
    """Finds the assistant turns in the text that a template renders of a conversation."""

    def __init__(self, template: ChatTemplate, *, learn_reasoning: bool = True) -> None:
        """Learn how the template writes an answer. Raises ConfigError as find_surroundings.

        learn_reasoning: whether thoughts are supervised.
        """
        self._template = template
        self._learn_reasoning = learn_reasoning
        self._found: dict[bool, Surroundings] = {}  # by whether they are of the template for tools
        if not template.marks_generation(()):
            self._around(())

    def _around(self, tools: Sequence[Message]) -> Surroundings:
        """Return what the template for conversations with these tools writes around an answer.

        Raises ConfigError as find_surroundings, or RecordError for a template that is for tools only.
        """
        own = bool(tools) and self._template.tool_use is not None
        if own not in self._found:
            try:
                self._found[own] = find_surroundings(self._template, tools if own else ())
            except ConfigError as error:
                if own:
                    raise RecordError(str(error)) from None
                raise
        return self._found[own]

    def mark(self, conversation: Conversation) -> list[MarkedText]:
        """Render a conversation and return its texts with the answers marked that have a loss weight.

        This is one text with all of them if the template renders each turn the same now and later. Otherwise turns
        that are rendered differently later have texts of their own. Turns after the last such answer are left out. A
        conversation without one has no texts.

        Raises RecordError if the template refuses the conversation, if an answer does not begin where the prompt ends,
        or if the template leaves out tools or a part of an answer.
        """
        last = max((i for i, _ in conversation.answers), default=-1)
        if last < 0:
            return []
        whole = replace(conversation, messages=conversation.messages[: last + 1])
        return in_any_variant(whole, self._mark)

    def _mark(self, conversation: Conversation) -> list[MarkedText]:
        if self._template.marks_generation(conversation.tools):
            _check_length(conversation)
            texts = [self._mark_by_tags(conversation)]
        else:
            texts = merge_turns(self._turns(conversation))
        self._check_context(conversation, texts[-1].text)
        return texts

    def _turns(self, conversation: Conversation) -> list[AnsweredTurn]:
        answers = conversation.answers
        if len(answers) > MANY_ANSWERS and (turns := turns_in_windows(conversation, self._turn)):
            return turns
        _check_length(conversation)
        return [self._turn(conversation, *answer) for answer in answers]

    def _check_context(self, conversation: Conversation, text: str) -> None:
        """Raise RecordError if the text lacks the tools or a turn that no assistant wrote."""
        messages, written = conversation.messages, squeeze(text)
        names = [squeeze(str(tool["function"].get("name", ""))) for tool in conversation.tools]
        if names and not any(name in written for name in names):
            raise _leaves_out(self._template, "the tools")
        place = 0  # of the turn before: turns mostly follow one another
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                continue
            if (found := written.find(squeeze(message["content"]), place)) >= 0:
                place = found
                continue
            if all(is_written(part, written) for part in message["content"].split(IMAGE)):
                continue
            if self._is_left_out(conversation, index):
                raise _leaves_out(self._template, f"this turn of {message['role']}", index)

    def _is_left_out(self, conversation: Conversation, index: int) -> bool:
        """Return whether the template writes the same whatever the turn says."""
        messages, tools = conversation.messages, conversation.tools
        probed = [*messages[:index], {**messages[index], "content": PROBE}, *messages[index + 1 :]]
        try:
            return self._template.render(probed, tools) == self._template.render(messages, tools)
        except TemplateRefusalError:
            return False

    def _turn(self, conversation: Conversation, index: int, weight: float) -> AnsweredTurn:
        messages, tools = conversation.messages[: index + 1], conversation.tools
        prompt, text, notes = self._prompt_and_whole(messages, tools)
        answered = self._around(tools).cut(text)
        learned = answered.removeprefix(prompt)
        written = Written(learned)
        if answered.startswith(prompt) and (missing := ", ".join(missing_parts(messages[-1], written, written))):
            raise _leaves_out(self._template, missing, index)
        if not answered.startswith(prompt) or not learned:
            raise RecordError(
                f"turn {len(messages)}: the chat template ({self._template.name}) asks for an answer with "
                f"{prompt[-40:]!r} and then writes it otherwise"
            )
        if self._forgets_the_end(messages, tools, learned):
            raise RecordError(
                f"turn {index + 1}: the chat template ({self._template.name}) writes no end after a single call, so a "
                "model would not learn to stop there; set data.chat_template to one that does"
            )
        whole = LearnedRange(len(prompt), len(answered), weight)
        holes = []
        if not self._learn_reasoning:
            holes = self._thoughts(text, lambda m: self._prompt_and_whole(m, tools)[1], messages, [index], [whole])
        return AnsweredTurn(text, tuple(without(whole, holes)), whole.end, notes)

    def _forgets_the_end(self, messages: Sequence[Message], tools: Sequence[Message], learned: str) -> bool:
        """Return whether the end mark is missing after one call that is there after two, as in DeepSeek-R1's template.

        A template may well end a call with another mark than an answer.
        """
        calls, mark = messages[-1].get("tool_calls") or [], self._around(tools).mark
        if len(calls) != 1 or not mark or learned.endswith(mark):
            return False
        try:
            twice = self._template.render([*messages[:-1], {**messages[-1], "tool_calls": calls * 2}], tools)
        except TemplateRefusalError:
            return False
        return self._around(tools).cut(twice).endswith(mark)

    def _prompt_and_whole(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, str, Notes]:
        """Return the text that asks for the last message, that text with the message, and what is to be noted.

        Templates differ in what they write before an answer once it is there. Some leave out the thought that their
        prompt opens: the prompt is then the text before that thought. Some leave out earlier thoughts, the text beside
        a call, or (Mistral's) a system turn: the answer is then written as after a single question.
        """
        prompt, text = self._rendered(messages, tools)
        bare, alone = prompt, text
        if not text.startswith(without_opened_thought(prompt)):
            bare, alone = self._rendered([QUESTION, messages[-1]], tools)
        if alone.startswith(bare):
            return prompt, prompt + alone.removeprefix(bare), ()
        prompt, bare = without_opened_thought(prompt), without_opened_thought(bare)
        if alone.startswith(bare):
            return prompt, prompt + alone.removeprefix(bare), (RecordOutcome.UNOPENED,)
        return prompt, text, ()

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[str, str]:
        text = self._around(tools).ended(self._template.render(messages, tools), messages[-1])
        return self._prompt(messages[:-1], tools, text), text

    def _prompt(self, messages: Sequence[Message], tools: Sequence[Message], text: str) -> str:
        """Return the text that asks for an answer to the messages, with which `text` begins.

        Where there are no messages, it ends with the heading of the answer: some templates then write no prompt.
        """
        heading = self._around(tools).heading
        if not messages and heading and heading in text:
            return text[: text.index(heading) + len(heading)]
        return self._template.render(messages, tools, prompt=True)

    def _mark_by_tags(self, conversation: Conversation) -> MarkedText:
        messages, tools, answers = conversation.messages, conversation.tools, dict(conversation.answers)
        text, places = self._template.render_marked(messages, tools)
        turns = None
        if len(set(answers.values())) > 1 or len(answers) < len(conversation.assistant_turns):
            turns = self._turns_of(conversation, text, places)
        weights = [next(iter(answers.values()))] * len(places) if turns is None else [answers.get(i, 0) for i in turns]
        spans = join_touching([LearnedRange(*place, w) for place, w in zip(places, weights, strict=True) if w])
        notes = (RecordOutcome.NO_THOUGHTS,) if self._check_tags(conversation, text, spans) else ()
        holes = []
        if not self._learn_reasoning:
            holes = self._thoughts(text, lambda m: self._template.render(m, tools), messages, answers, spans)
        pieces = tuple(piece for span in spans for piece in without(span, holes))
        return MarkedText(text, pieces, tuple(span.end for span in spans), notes)

    def _turns_of(self, conversation: Conversation, text: str, places: Sequence[Range]) -> list[int]:
        """Return the index of the assistant turn that each range of the text belongs to."""
        turns = conversation.assistant_turns
        rendered = (self._template.render(conversation.messages[:i], conversation.tools) if i else "" for i in turns)
        begins = [common_length(text, before) for before in rendered]
        return [turns[max(bisect_right(begins, start) - 1, 0)] for start, _ in places]

    def _check_tags(self, conversation: Conversation, text: str, spans: Sequence[LearnedRange]) -> bool:
        """Return whether thoughts of turns before the last question are missing.

        Raises RecordError for anything else that is missing in the spans. A template may mark some turns only: of the
        others all must be in the text.
        """
        messages = conversation.messages
        last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        learned, whole = Written("".join(text[span.start : span.end] for span in spans)), Written(text)
        omits_thoughts = False
        for index, _ in conversation.answers if spans else ():
            missing = list(missing_parts(messages[index], learned, whole))
            if missing and index not in self._turns_of(conversation, text, [(span.start, span.end) for span in spans]):
                missing = list(missing_parts(messages[index], whole, whole))
            if index < last_question and THOUGHT in missing:
                omits_thoughts = True
                missing.remove(THOUGHT)
            if missing:
                raise _leaves_out(self._template, ", ".join(missing), index)
        return omits_thoughts

    def _thoughts(
        self, text: str, write: Callable[[Sequence[Message]], str], messages: Sequence[Message],
        answers: Iterable[int], spans: Iterable[LearnedRange],
    ) -> list[Range]:  # fmt: skip
        """Return the ranges of the answers' thoughts in a text, and of empty ones that the template adds.

        write: returns the text for messages; `text` is that for `messages`.
        """
        found = [empty_thought(text, span.start) for span in spans]
        for index in answers:
            if parts_of(messages[index]).thought:
                probed = [*messages[:index], probed_thought(messages[index]), *messages[index + 1 :]]
                there = thought_range(text, write(probed))
                found += [there] if there else []
        return sorted(found)


def render_prompt(template: ChatTemplate, conversation: Conversation) -> str:
    """Return the text that asks for the next answer, with the turns before it written as for training.

    Raises RecordError if the template refuses them, or leaves out texts or calls of the assistant.
    """

    def rendered(form: Conversation) -> str:
        text = Written(template.render(form.messages, form.tools, prompt=True))
        for index in form.assistant_turns:
            if missing := [part for part in missing_parts(form.messages[index], text, text) if part != THOUGHT]:
                raise _leaves_out(template, ", ".join(missing), index)
        return text.text

    return in_any_variant(conversation, rendered)


def _check_length(conversation: Conversation) -> None:
    """Raise RecordError for a conversation that would be rendered for hours, up to each of its answers."""
    chars = sum(TURN_CHARS + len(str(message)) for message in conversation.messages)
    if chars * len(conversation.answers) > MOST_RENDERED:
        raise RecordError(
            f"{len(conversation.messages)} turns are too many for one conversation, which is rendered for each "
            "of its answers with this chat template; divide it into several"
        )


def _leaves_out(template: ChatTemplate, what: str, index: int | None = None) -> RecordError:
    turn = "" if index is None else f"turn {index + 1}: "
    hint = " (of the named ones, qwen and llama3 write calls)" if "call" in what or "tools" in what else ""
    if THOUGHT in what:
        hint = ", or data.chat_template_args to what turns thoughts on, such as {enable_thinking: true}"
    return RecordError(
        f"{turn}the chat template ({template.name}) leaves out {what}; set data.chat_template to one that writes it"
        f"{hint}, or take it out of the record"
    )
