"""What this build contains. Every feature is in every build, because GPU kernels are compiled at their first use."""

_FEATURES = [
    "BACKWARD", "SPLIT", "PAGEDKV", "APPENDKV", "LOCAL", "SOFTCAP", "PACKGQA", "FP16", "FP8", "VARLEN", "CLUSTER",
    "HDIM64", "HDIM96", "HDIM128", "HDIM192", "HDIM256", "SM8x",
]  # fmt: skip

CONFIG = {
    "build_flags": {
        **{f"FLASHATTENTION_DISABLE_{feature}": False for feature in _FEATURES},
        # Values whose keys lie side by side in memory are copied.
        "FLASHATTENTION_ENABLE_VCOLMAJOR": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
        "FLASH_ATTENTION_DISABLE_HDIMDIFF192": False,
    }
}


def show() -> None:
    """Prints the build flags.

    >>> show()  # doctest: +ELLIPSIS
    FLASHATTENTION_DISABLE_BACKWARD = False
    ...
    """
    for flag, value in CONFIG["build_flags"].items():
        print(f"{flag} = {value}")
