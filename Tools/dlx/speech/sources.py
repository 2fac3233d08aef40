"""What the speech corpora are made of, as data sets of `dlx.data`: packages of Debian 12, taken without installing."""

from __future__ import annotations

from dlx.data import DEBIAN_HOSTS, DataSet, Member, Package, Source, register

LIBRARIES = "usr/lib/x86_64-linux-gnu"
FLITE_LIBRARIES = (
    "libflite libflite_cmu_grapheme_lang libflite_cmu_grapheme_lex libflite_cmu_indic_lang libflite_cmu_indic_lex "
    "libflite_cmu_time_awb libflite_cmu_us_awb libflite_cmu_us_kal libflite_cmu_us_kal16 libflite_cmu_us_rms "
    "libflite_cmu_us_slt libflite_cmulex libflite_usenglish"
).split()
SOUNDS = "usr/share/asterisk/sounds/en_US_f_Allison"


def _sources(*packages: tuple[Package, str, str, tuple[Member, ...]]) -> tuple[Source, Source]:
    """From apt, else the same files from Debian's servers: (package, folder of the pool, file name there, members)."""
    from_apt = tuple((package, members) for package, _, _, members in packages)
    from_url = tuple(
        (
            Package(
                "url", package.name, package.version.split(":")[-1], file, package.sha256, package.size,
                tuple(f"{host}/{folder}/{file}" for host in DEBIAN_HOSTS),
            ),
            members,
        )
        for package, folder, file, members in packages
    )  # fmt: skip
    return from_apt, from_url


def _package(name: str, version: str, sha256: str, size: int) -> Package:
    return Package("apt", name, version, f"{name}_*.deb", sha256, size)


FLITE = register(
    DataSet(
        name="flite",
        version="2.2-5",
        licence="BSD-like (Carnegie Mellon University)",
        citation="Black and Lenzo: Flite, a small fast run-time synthesis engine, 2001",
        summary="The speech synthesiser Flite for x86-64 with the voices rms, slt, awb and kal16",
        sources=_sources(
            (
                _package("flite", "2.2-5", "f4ce03470bf9974c2cb9cacd981e6be29339ef4c97cf994dd6fa3f90e6544db9", 252784),
                "f/flite",
                "flite_2.2-5_amd64.deb",
                (Member("usr/bin/flite", "bin/flite"), Member("usr/share/doc/flite/copyright", "copyright")),
            ),
            (
                _package(
                    "libflite1", "2.2-5", "bfa8c591f1b47730b30b372ec38e02918a1c9795eada67684e1746390ad2f061", 12823776
                ),
                "f/flite",
                "libflite1_2.2-5_amd64.deb",
                tuple(Member(f"{LIBRARIES}/{name}.so.2.2", f"lib/{name}.so.1") for name in FLITE_LIBRARIES),
            ),
            (
                _package(
                    "libasound2", "1.2.8-1+b1", "44c77b076a7b11ae99712439022d822245b1994c435da564ebd320bb676faf4c",
                    361788,
                ),
                "a/alsa-lib",
                "libasound2_1.2.8-1+b1_amd64.deb",
                (Member(f"{LIBRARIES}/libasound.so.2.0.0", "lib/libasound.so.2"),),
            ),
        ),
    )
)  # fmt: skip

WORDNET = register(
    DataSet(
        name="wordnet",
        version="3.0-37",
        licence="WordNet 3.0 licence (free use with notice)",
        citation="Fellbaum (ed.): WordNet, an electronic lexical database, MIT Press, 1998",
        summary="The dictionary WordNet 3.0, whose entries hold 17,000 example sentences fit to be read aloud",
        sources=_sources(
            (
                _package(
                    "wordnet-base", "1:3.0-37", "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
                    6467132,
                ),
                "w/wordnet",
                "wordnet-base_3.0-37_all.deb",
                tuple(
                    Member(f"usr/share/wordnet/data.{kind}", f"data.{kind}") for kind in ("noun", "verb", "adj", "adv")
                ),
            ),
        ),
    )
)  # fmt: skip

ASTERISK = register(
    DataSet(
        name="asterisk-sounds-en",
        version="1.6.1-1",
        licence="CC-BY-SA-3.0",
        citation="Asterisk core sounds, English: spoken by Allison Smith, copyright Digium, Inc.",
        summary="563 prompts of a telephone system, studio recordings of one woman at 16 kHz, with their texts",
        terms="Share alike: sound made of it, and models trained on it, where passed on, keep the credit.",
        sources=_sources(
            (
                _package(
                    "asterisk-core-sounds-en", "1.6.1-1",
                    "973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50", 22844,
                ),
                "a/asterisk-core-sounds",
                "asterisk-core-sounds-en_1.6.1-1_all.deb",
                (
                    Member("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz", "texts.txt.gz"),
                    Member("usr/share/doc/asterisk-core-sounds-en/copyright", "copyright"),
                ),
            ),
            (
                _package(
                    "asterisk-core-sounds-en-g722", "1.6.1-1",
                    "38c5261820b406dcb0ecb37675720da2b0864850690690352ca52707eb623806", 10565860,
                ),
                "a/asterisk-core-sounds",
                "asterisk-core-sounds-en-g722_1.6.1-1_all.deb",
                (Member(f"{SOUNDS}/*.g722", "sounds/"),),
            ),
        ),
    )
)  # fmt: skip
