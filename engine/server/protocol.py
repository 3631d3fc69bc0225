"""The bodies of calls: OpenAI's fields, and ours beside them at the top level, where `extra_body` puts them.

Fields that would change the answer and are not served are refused (`NOT_SERVED`); fields that nobody here knows are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

MAX_NAME = 256  # characters of a client's, a session's or a request's name


def _encodable(text: str) -> str:
    if not text.isascii():
        text.encode()  # half of a surrogate pair is no text: UnicodeEncodeError is a ValueError
    return text


Text = Annotated[StrictStr, AfterValidator(_encodable)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Name = Annotated[Text, Field(max_length=MAX_NAME)]
# of a list the first fault is told: one for each of its elements would take a second and a gigabyte of a body of a megabyte
Texts = Annotated[list[Text], Field(fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NOT_SERVED: dict[str, tuple[Any, ...]] = {  # field: values that ask for nothing
    "best_of": (1,), "suffix": ("",), "logit_bias": ({},), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
    "prediction": (), "use_beam_search": (False,), "prompt_logprobs": (), "structured_outputs": (), "guided_json": (),
    "guided_regex": (), "guided_choice": (), "guided_grammar": (), "allowed_token_ids": (), "bad_words": ([],),
    "include_stop_str_in_output": (False,), "truncate_prompt_tokens": (), "skip_special_tokens": (True,),
    "chat_template": (), "chat_template_kwargs": ({},), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "length_penalty": (1.0, 1),
}  # fmt: skip


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = False
    continuous_usage_stats: StrictBool | None = False


class Objectives(BaseModel):
    """Latency objectives in s."""

    model_config = ConfigDict(extra="forbid")
    ttft: Seconds | None = None
    tpot: Seconds | None = None
    e2e: Seconds | None = None


class Asked(BaseModel):
    """What both kinds of calls share. Null is as good as absent."""

    model_config = ConfigDict(extra="ignore")
    model: StrictStr | None = None
    max_tokens: StrictInt | None = Field(None, ge=1, description="tokens of the answer, at most")
    n: StrictInt = Field(1, ge=1)
    stream: StrictBool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Text | Texts = []
    seed: StrictInt | None = None
    temperature: Number = 1.0
    top_p: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    user: Name | None = None
    # beside OpenAI's
    top_k: StrictInt = Field(0, ge=-1, description="0 or -1: off")
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    stop_token_ids: Tokens = []
    min_tokens: StrictInt = Field(0, ge=0)
    ignore_eos: StrictBool = False
    return_token_ids: StrictBool = False
    continuous_usage_stats: StrictBool = False
    priority: Number = Field(0.0, description="lower goes first")
    client: Name | None = Field(None, description="who asks, for fairness between clients; default: user")
    session: Name | None = None
    slo: Objectives | None = None
    timeout: Seconds | None = Field(None, description="s after which it is aborted")
    predicted_len: Number | None = Field(None, ge=0, description="tokens; instead of the predictor's word")
    answer_len: StrictInt | None = Field(None, ge=1, description="tokens that the answer is to have; of a replaying server")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for field, nothing in NOT_SERVED.items():
            value = data.get(field)
            if value is not None and not any(type(value) is type(one) and value == one for one in nothing):
                raise ValueError(f"{field} is not served here")
        return {key: value for key, value in data.items() if value is not None}

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def continuous_usage(self) -> bool:
        return self.continuous_usage_stats or bool(self.stream_options.continuous_usage_stats)


class CompletionBody(Asked):
    prompt: Text | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    echo: StrictBool = False
    logprobs: StrictInt | None = Field(None, ge=0, le=20)

    @property
    def num_prompts(self) -> int:
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return 1 if one else len(self.prompt)


class Part(BaseModel):
    type: Literal["text"]
    text: Text


class Turn(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[Part], Field(fail_fast=True)]
    name: Name | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatBody(Asked):
    messages: list[Turn] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: StrictInt | None = Field(None, ge=1, description="the newer name of max_tokens, and before it")
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)


class TokenizeBody(BaseModel):
    """Either a prompt or the messages of a chat."""

    model: StrictStr | None = None
    prompt: Text | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeBody(BaseModel):
    model: StrictStr | None = None
    tokens: Tokens
