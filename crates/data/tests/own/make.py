"""Makes the files of this folder with numpy, Pillow and safetensors:

    pip install numpy pillow safetensors && python crates/data/tests/own/make.py

Images are small and made by a formula. `pictures.npz` holds what Pillow decodes, converts and resizes them to.
"""

import pathlib

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent


def colours(height, width):
    """A smooth image with an edge in it."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [(7 * x + 3 * y) % 256, (x * y + 11 * y) % 256, np.where(x > y, 230, 20)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def smooth(height, width):
    """One that JPEG keeps nearly as it is."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(x / 9), 128 + 90 * np.cos(y / 7), 128 + 80 * np.sin((x + y) / 11)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def pictures():
    image = Image.fromarray(colours(23, 37))
    files = {
        "colour.png": image,
        "grey.png": image.convert("L"),
        "alpha.png": Image.merge("RGBA", (*image.split(), image.convert("L"))),
        "palette.png": image.quantize(16),
        "bits.png": image.convert("1"),
        "deep.png": Image.fromarray(colours(23, 37)[:, :, 0].astype(np.uint16) * 257),
    }
    expected = {}
    for name, picture in files.items():
        picture.save(HERE / name, optimize=True)
        stored = Image.open(HERE / name)
        if stored.mode.startswith("I"):
            stored = Image.fromarray((np.asarray(stored) >> 8).astype(np.uint8))
        for mode in ("RGB", "L"):
            for height, width in ((23, 37), (8, 8), (5, 40), (31, 64), (1, 1), (23, 9)):
                resized = stored.convert(mode).resize((width, height), Image.Resampling.BILINEAR)
                channels = 3 if mode == "RGB" else 1
                expected[f"{name}:{height}x{width}x{channels}"] = np.asarray(resized)
    photo = Image.fromarray(smooth(45, 61))
    photo.save(HERE / "photo.jpg", quality=92, subsampling=0)
    photo.save(HERE / "halved.jpg", quality=92, subsampling=2)
    photo.save(HERE / "progressive.jpg", quality=92, subsampling=0, progressive=True)
    photo.convert("L").save(HERE / "grey.jpg", quality=92)
    for name in ("photo", "halved", "progressive", "grey"):
        decoded = Image.open(HERE / f"{name}.jpg").convert("RGB")
        expected[f"{name}.jpg:45x61x3"] = np.asarray(decoded)
    np.savez_compressed(HERE / "pictures.npz", **expected)


def arrays():
    """The same twelve images of 5 x 6 in every way that numpy can write them."""
    images = (np.arange(12 * 5 * 6 * 3) * 37 % 256).astype(np.uint8).reshape(12, 5, 6, 3)
    labels = np.arange(12) % 3
    split = {"test_images": images[8:], "test_labels": labels[8:]}
    train = {"train_images": images[:8], "train_labels": labels[:8]}
    np.savez(HERE / "stored.npz", **train, **split)
    np.savez_compressed(HERE / "deflated.npz", **train, **split)
    first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    np.savez(HERE / "planes.npz", x_train=first[:8], y_train=labels[:8].astype(np.int8), x_test=first[8:],
             y_test=labels[8:].astype(np.int8))
    fortran = np.asfortranarray(images)
    np.savez(HERE / "fortran.npz", images=fortran, labels=np.asfortranarray(labels.reshape(12, 1)))
    np.savez(HERE / "big_endian.npz", images=(images / 255).astype(">f4"), labels=labels.astype(">u2"))
    np.savez(HERE / "double.npz", images=images / 255, labels=labels.astype(np.uint64))
    np.savez(HERE / "grey.npz", images=images[..., 0], labels=labels)
    np.savez(HERE / "objects.npz", images=images, labels=np.array([str(x) for x in labels], dtype=object))
    np.savez(HERE / "floating_labels.npz", images=images, labels=labels.astype(np.float32))
    np.savez(HERE / "empty.npz", images=images[:0, :, :, 0], labels=labels[:0])
    np.savez(HERE / "negative.npz", images=images, labels=labels - 1)
    save_file({"images": (images / 255).astype(np.float32), "labels": labels.astype(np.int32)},
              HERE / "floats.safetensors")
    save_file({"images": images, "labels": labels}, HERE / "bytes.safetensors")


pictures()
arrays()
