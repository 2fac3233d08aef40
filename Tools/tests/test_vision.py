"""One decoder for all kinds of pictures (case O07), preprocessing, captions."""

import io

import numpy as np
import pytest
from PIL import Image

from dlx import vision


def half_white(mode="L"):
    """40 wide, 80 high, the left half white."""
    pixels = np.zeros((80, 40), np.uint8)
    pixels[:, :20] = 255
    return Image.fromarray(pixels).convert(mode)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def variants():
    grey = half_white()
    rgba = half_white("RGBA")
    rgba.putalpha(Image.fromarray(np.full((80, 40), 3, np.uint8)))
    la = half_white("LA")
    la.putalpha(0)
    sixteen = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    return {
        "grey": grey, "rgb": half_white("RGB"), "rgba": rgba, "la": la, "bit": half_white("1"),
        "palette": half_white("RGB").quantize(2), "16-bit": sixteen,
        "int32": Image.fromarray(np.asarray(grey).astype(np.int32) * 257),
        "float": Image.fromarray(np.asarray(grey).astype(np.float32) / 255),
        "float 0..255": Image.fromarray(np.asarray(grey).astype(np.float32)),
        "cmyk": half_white("CMYK"), "ycbcr": half_white("YCbCr"), "hsv": half_white("HSV"),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(variants()))
def test_every_mode_becomes_the_same_rgb(name):
    image = variants()[name]
    found = vision.decode_image(image)
    assert found.mode == "RGB" and found.size == (40, 80)
    difference = np.abs(np.asarray(found).astype(int) - np.asarray(half_white("RGB")).astype(int))
    assert difference.max() <= (2 if name in ("ycbcr", "hsv") else 0)


@pytest.mark.parametrize("name", ["grey", "rgba", "la", "palette", "16-bit", "bit"])
def test_png_files(name, tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(encoded(variants()[name]))
    expected = np.asarray(half_white("RGB"))
    with open(path, "rb") as stream:
        for source in (path, str(path), path.read_bytes(), stream):
            np.testing.assert_array_equal(np.asarray(vision.decode_image(source)), expected)


def test_transparent_palette_and_cmyk_jpeg():
    image = half_white("RGB").quantize(2)
    np.testing.assert_array_equal(
        np.asarray(vision.decode_image(encoded(image, transparency=0))), np.asarray(half_white("RGB"))
    )
    found = np.asarray(vision.decode_image(encoded(half_white("CMYK"), "JPEG", quality=95))).astype(int)
    assert np.abs(found - np.asarray(half_white("RGB"))).max() <= 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    upright = Image.fromarray(np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3) * 3)
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = vision.decode_image(encoded(stored, exif=exif))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(upright))


def test_arrays():
    grey = np.asarray(half_white())
    expected = np.asarray(half_white("RGB"))
    for array in (grey, grey[..., None], expected, np.dstack([expected, grey]), grey > 0, grey.astype(np.uint16) * 257,
                  grey.astype(np.float64) / 255):  # fmt: skip
        np.testing.assert_array_equal(np.asarray(vision.decode_image(array)), expected)
    values = np.array([[0, 128, 129, 385, 386, 65535]], np.uint16)
    assert np.asarray(vision.decode_image(values))[0, :, 0].tolist() == [0, 0, 1, 1, 2, 255]
    for bad in (np.zeros((3, 8, 8), np.uint8), np.zeros(5, np.uint8), np.zeros((4, 4), np.int64),
                np.array([[np.nan]]), np.array([[2.0]]), np.zeros((0, 4), np.uint8)):  # fmt: skip
        with pytest.raises(ValueError):
            vision.decode_image(bad)


def test_damaged_files_name_the_path(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    for kind in ("JPEG", "PNG", "BMP", "TIFF", "WEBP", "GIF"):
        content = encoded(noise, kind)
        path = tmp_path / f"x.{kind.lower()}"
        for cut in (0, 3, 20, len(content) // 2):
            path.write_bytes(content[:cut])
            with pytest.raises(ValueError, match=str(path)):
                vision.decode_image(path)
    with pytest.raises(ValueError, match="gone.png: no such picture"):
        vision.decode_image(tmp_path / "gone.png")
    (tmp_path / "text.jpg").write_text("hello")
    with pytest.raises(ValueError, match="text.jpg: not a picture"):
        vision.decode_image(tmp_path / "text.jpg")
    with pytest.raises(ValueError, match="<5 bytes>"):
        vision.decode_image(b"hello")


def test_huge_picture_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match="refused"):
        vision.decode_image(encoded(half_white("RGB")))


def test_preprocessing():
    torch = pytest.importorskip("torch")
    prepare = vision.Preprocessing(resize=300, crop=300, mean=(0, 0, 0), std=(1, 1, 1))
    tensors = {name: prepare(image) for name, image in variants().items() if name not in ("hsv", "ycbcr")}
    for name, tensor in tensors.items():
        assert tensor.shape == (3, 300, 300) and tensor.isfinite().all(), name
        assert tensor[:, :, :140].min() == 1 and tensor[:, :, 160:].max() == 0, name
        assert (tensor - tensors["rgb"]).abs().max() <= 1e-6, name
    normalised = vision.Preprocessing()(half_white("RGB"))
    assert normalised.shape == (3, 224, 224) and torch.isclose(normalised.max(), torch.tensor((1 - 0.406) / 0.225))
    grey = vision.Preprocessing(resize=None, crop=28, mean=(0.5,), std=(0.5,), channels=1)(np.zeros((28, 28), np.uint8))
    assert grey.shape == (1, 28, 28) and (grey == -1).all()


def test_preprocessing_travels():
    prepare = vision.Preprocessing(resize=256, crop=224, interpolation="bicubic", mean=[0.5] * 3, std=[0.5] * 3)
    assert vision.Preprocessing.from_dict(prepare.to_dict()) == prepare
    assert prepare.to_dict()["mean"] == [0.5, 0.5, 0.5]
    for bad in ({"interpolation": "cubic"}, {"resize": 10}, {"mean": [0.5]}, {"std": [0, 1, 1]}, {"channels": 2},
                {"size": 3}, {"crop": 0}):  # fmt: skip
        with pytest.raises(ValueError):
            vision.Preprocessing.from_dict(bad)
    with pytest.raises(ValueError, match="picture of 40x80 is too small for a crop of 64x64"):
        vision.Preprocessing(resize=None, crop=64).crop_image(half_white())


def test_resize_short():
    for size, expected in (((100, 50), (64, 32)), ((50, 100), (32, 64)), ((101, 50), (64, 32)), ((7, 7), (32, 32))):
        assert vision.resize_short(Image.new("RGB", size), 32).size == expected


@pytest.mark.parametrize("size", [(300, 18), (18, 300), (60, 45), (45, 61), (64, 64)])
def test_resize_and_crop(size, monkeypatch):
    """The old way exactly for ordinary pictures; cut before it is scaled, the same up to rounding."""
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    for kind in vision.INTERPOLATIONS:
        whole = np.asarray(vision.centre_crop(vision.resize_short(noise, 32, kind), 28))
        if max(size) <= 16 * min(size):
            np.testing.assert_array_equal(np.asarray(vision.resize_and_crop(noise, 32, 28, kind)), whole)
        if kind == "bilinear":  # the others differ where a value is at the edge of two pixels or beyond 0 to 255
            monkeypatch.setattr(vision, "LONGEST", 0)
            cut = np.asarray(vision.resize_and_crop(noise, 32, 28, kind))
            assert np.abs(cut.astype(int) - whole).max() <= 1
            monkeypatch.undo()


@pytest.mark.parametrize("size", [(20000, 1), (1, 20000)])
def test_lines_stay_small(size, monkeypatch):
    """No picture on the way is larger than a few thousand pixels on a side."""
    made = []
    resize = Image.Image.resize
    monkeypatch.setattr(Image.Image, "resize", lambda self, to, *a, **k: made.append(to) or resize(self, to, *a, **k))
    line = Image.new("RGB", size, "red")
    assert vision.Preprocessing().crop_image(line).size == (224, 224)
    sheet = vision.annotate(line, ["a class with a name", "another"])
    assert max(sheet.size) <= vision.SHEET_LIMIT + 200 and sheet.width >= 160
    vision.contact_sheet([line], ["x"])
    assert max(w * h for w, h in made) <= vision.SHEET_LIMIT * 320


def test_captions_have_letters_of_all_kinds():
    def drawn(text):
        return vision.annotate(Image.new("RGB", (320, 20)), [text]).tobytes()

    texts = ["ü", "é", "ł", "я", "Ω", "ß"]
    assert len({drawn(text) for text in texts}) == len(texts), "a font without them draws the same box for all"
    assert drawn("gru\u0308n") == drawn("gr\u00fcn")


def test_captions_without_any_font_file(monkeypatch):
    monkeypatch.setattr(vision, "_font_files", lambda: ())
    test_captions()
    monkeypatch.setattr(vision, "_font_files", lambda: ("/nowhere/DejaVuSans.ttf",))
    test_captions()


def test_captions():
    picture = half_white("RGB")
    sheet = vision.annotate(picture, ["one", "a long line " * 12])
    assert sheet.width >= 320 and sheet.height > sheet.width * 2
    text = np.asarray(sheet)[sheet.width * 2 :]
    assert (text < 100).any() and (text[:, -3:] == 255).all(), "dark letters, none cut at the edge"
    assert vision.annotate(picture, []).size == (320, 640)
    grid = vision.contact_sheet([picture] * 5, [f"caption {n}\nmore" for n in range(5)], columns=3, cell=100)
    assert 300 < grid.width < 330 and grid.height > 200
    with pytest.raises(ValueError, match="as many captions"):
        vision.contact_sheet([picture], [])


def test_find_images(tmp_path):
    for name in ("b.JPG", "a/c.png", ".hidden/x.png", "notes.txt", ".d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [p.relative_to(tmp_path).as_posix() for p in vision.find_images(tmp_path)] == ["a/c.png", "b.JPG"]
