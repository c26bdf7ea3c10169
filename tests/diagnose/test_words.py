"""Every number that `diagnose` prints has a sentence, and every sentence a definition in the room's README."""

from pathlib import Path

import pytest

from qrl import diagnose
from qrl.diagnose import schemes, words

README = (Path(diagnose.__file__).parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("metric", "measure", "says"),
    [
        ("weights/update_survival", "update_survival", "read it with update_cosine"),
        ("weights/update_survival_awq-ct", "update_survival", "length of the stored update"),
        ("weights/w4_snr_db_base", "w4_snr_db", "decibels"),
        ("weights/rtn_relative_mse", "rtn_relative_mse", "error of the proxy,"),
        ("weights/relative_mse_rtn-int4_base", "relative_mse", "scheme's weights"),
        ("weights/channel_outlier_frac", "channel_outlier_frac", "rows"),
        ("behaviour/kl_nf4_kv-fp8_base", "kl", "nats"),
        ("behaviour/n", "n", "texts"),
    ],
)
def test_a_metric_is_explained_whatever_scheme_ends_its_name(metric, measure, says):
    assert words.meaning(metric)[0] == measure and says in words.meaning(metric)[1]


def test_what_has_no_sentence_is_an_error_and_not_left_out():
    with pytest.raises(KeyError):
        words.meaning("weights/new_measure")


def test_a_glossary_names_each_measure_once():
    lines = words.glossary(["weights/kurtosis", "weights/kurtosis_base", "weights/update_cosine_nf4"])
    assert [line.partition(":")[0] for line in lines[:-1]] == ["kurtosis", "update_cosine"]
    assert lines[-1] == words.SUFFIXES and all(line.endswith(".") for line in lines)


def test_measures_are_those_of_the_room_and_of_its_readme():
    assert set(schemes.OF_UPDATE) - {"change_norm"} <= set(words.MEANINGS)
    assert [measure for measure in words.MEANINGS if measure != "n" and measure not in README] == []
