"""Takes the picture of a run's page that README shows, by Chromium: `python docs/picture.py CHROMIUM`.

The picture in git says which version and which verdict it shows. While the gallery has the same, it stays.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin

from hookcb import load_report
from hookcb.report.data import PageData

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "build" / "gallery" / "dead-relu.html"
PICTURE = ROOT / "docs" / "images" / "page.png"
SIZE = 1200, 945  # pixels: to the end of the loss


def main(chromium: str | None) -> None:
    """Takes the picture if the one in git shows something else; without Chromium it stays."""
    data = load_report(PAGE)
    wanted = {"Software": f"hookcb {data.hookcb}", "Description": caption(data)}
    if PICTURE.exists() and texts(PICTURE) == wanted:
        return
    if chromium is None:
        sys.stderr.write(
            f"{PICTURE} is out of date, and there is no Chromium to take it anew: make pages installs it\n"
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        taken = Path(folder) / "page.png"
        options = [f"--window-size={SIZE[0]},{SIZE[1]}", "--hide-scrollbars", "--virtual-time-budget=5000"]
        command = [chromium, "--headless", "--no-sandbox", *options, f"--screenshot={taken}", PAGE.as_uri()]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)
        info = PngImagePlugin.PngInfo()
        for key, text in wanted.items():
            info.add_itxt(key, text)
        few_colors = Image.open(taken).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        few_colors.save(PICTURE, pnginfo=info, optimize=True)


def caption(data: PageData) -> str:
    """Verdict that a page shows."""
    first = data.verdict["findings"][0]
    lines = [data.headline, first["message"], *first["causes"], *first["next_steps"], *data.verdict["looked"]]
    return "\n".join(lines)


def texts(picture: Path) -> dict[str, str]:
    """What a picture says of itself."""
    with Image.open(picture) as image:
        return {key: str(text) for key, text in image.info.items() if key in ("Software", "Description")}


if __name__ == "__main__":
    main(next(iter(sys.argv[1:]), None))
