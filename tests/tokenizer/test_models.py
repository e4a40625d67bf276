"""Real vocabularies against transformers' own GGUF reader."""

from tests.tokenizer import golden


def test_the_golden_files_are_what_they_should_be():
    for name, least, chats in (("smollm2", 3900, 12), ("gemma3", 2000, 0)):
        expected = golden.read(name)
        texts = expected["texts"]
        assert len(set(texts)) > least * 0.9 and len(texts) == len(expected["ids"]) >= least
        assert "" in texts and len(expected["chats"]) == chats
        assert len({token_id for ids in expected["ids"] for token_id in ids}) > 3000


def test_smollm2(smollm2):
    golden.check_all(smollm2, golden.read("smollm2"))
    assert smollm2("Hi").input_ids == smollm2.encode("Hi", add_special_tokens=False)  # this model has no BOS in front


def test_gemma3(gemma3):
    golden.check_all(gemma3, golden.read("gemma3"))
    assert gemma3.chat_template is None
    assert gemma3("").input_ids == [gemma3.bos_token_id] and gemma3.encode("", add_special_tokens=False) == []
