"""The text on which activations are measured before a model is quantized to int8."""

from hogwild_engine.api.errors import NoChatTemplateError, RequestError
from hogwild_engine.text.chat_template import ChatTemplate

CALIBRATION_TEXT = """\
<|user|> Please explain in a few sentences why the sky looks blue at noon and red in the evening.
Sunlight is a mixture of all colours. On its way through the air it meets molecules that are much
smaller than its waves, and they scatter short waves far more strongly than long ones. At noon the
blue part therefore reaches us from every direction. In the evening the light has a longer way to
go, most of the blue is lost, and what is left is orange and red.

```python
def merge(left: list[int], right: list[int]) -> list[int]:
    # take the smaller head until one list is empty
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
```

1. The train leaves at 8:45 and needs 3 hours and 25 minutes, so it arrives at 12:10.
2. 17 x 24 = 408, and 408 / 6 = 68. {"name": "Ada", "year": 1815, "tags": ["logic", "engines"]}
Les chats dorment au soleil. Der Zug kommt um halb neun. Hoy hace mucho calor. 今天天气很好。
"""


def calibration_ids(chat: ChatTemplate) -> list[int]:
    """Return the text's token ids: as a user's message, or plain without a usable chat template."""
    try:
        return chat.render([{"role": "user", "content": CALIBRATION_TEXT}])
    except (NoChatTemplateError, RequestError):
        return chat.encode(CALIBRATION_TEXT)
