import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsieve.wire.codec import MessageError
from fedsieve.wire.envelope import FRAME, unwrap, wrap

heads = st.dictionaries(
    st.text(max_size=5).filter(lambda key: key != "lengths"),
    st.one_of(st.integers(), st.text(max_size=9), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    max_size=4,
)
messages = st.lists(st.binary(max_size=20), max_size=4)


@given(heads, messages)
def test_what_was_wrapped_is_unwrapped(head, parts):
    assert unwrap(wrap(head, parts)) == (head, parts)


@given(heads, messages, st.data())
def test_a_damaged_frame_or_head_and_a_wrong_length_are_refused(head, parts, data):
    envelope = bytearray(wrap(head, parts))
    fragile = len(envelope) - sum(map(len, parts))  # messages have checksums of their own
    place = data.draw(st.integers(0, 8 * fragile - 1))
    envelope[place // 8] ^= 1 << place % 8
    with pytest.raises(MessageError):
        unwrap(bytes(envelope))
    whole = wrap(head, parts)
    with pytest.raises(MessageError):
        unwrap(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(MessageError):
        unwrap(whole + data.draw(st.binary(min_size=1, max_size=9)))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_understood(content):
    for envelope in (content, wrap({})[: FRAME.size] + content):
        try:
            unwrap(envelope)
        except MessageError as error:
            assert error.reason and str(error)


@pytest.mark.parametrize("head", ["[]", '{"lengths": [-1]}', '{"lengths": [true]}', '{"lengths": 3}', "{}", "{", '"a"'])
def test_a_sound_frame_around_nonsense_is_refused(head):
    import xxhash

    text = head.encode()
    with pytest.raises(MessageError, match="not as agreed"):
        unwrap(FRAME.pack(b"fse", 1, len(text), xxhash.xxh3_64_intdigest(text)) + text)
