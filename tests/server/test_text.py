"""Text that is given out piece by piece is the text of the whole answer."""

from __future__ import annotations

import random

import pytest

from paceline.server.text import TextStream


class ByteTokenizer:
    """One token per byte of UTF-8; token 256 is special."""

    def decode(self, tokens, skip_special_tokens=False):
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


@pytest.mark.parametrize("seed", range(20))
def test_pieces_make_up_the_text(seed):
    rng = random.Random(seed)
    text = "".join(rng.choice("ab é漢🚴") for _ in range(40))
    stop = (rng.choice(["ba", "é🚴", "aaa"]), "bb漢")
    cut = min([text.find(s) for s in stop if s in text], default=len(text))
    tokens, stream, pieces = list(text.encode()), TextStream(ByteTokenizer(), stop), []
    position = 0
    while position < len(tokens) and cut >= len(ByteTokenizer().decode(tokens[:position])):
        count = rng.randint(1, 5)
        pieces.append(stream.add(tokens[position : position + count]))
        position += count
    sent = "".join(pieces)
    assert text[:cut].startswith(sent), "nothing of a stop string is sent"
    assert sent + stream.finish(text[:cut]) == text[:cut]


def test_text_is_sent_as_soon_as_it_is_sure():
    stream = TextStream(ByteTokenizer(), ("stop",))
    assert [stream.add(list(piece.encode())) for piece in ("a", "bs", "t", "x", "sto")] == ["a", "b", "", "stx", ""]
    assert stream.finish("abstxsto") == "sto"
    bike = list("🚴".encode())
    stream = TextStream(ByteTokenizer(), ())
    assert [stream.add([byte]) for byte in bike] == ["", "", "", "🚴"]
    assert stream.add([256]) == ""
