//! Batches: the same bytes whatever the threads, the start or the interruption.
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use taper_data::{
    Augment, Fill, Flip, ImageBatch, ImagePipeline, Images, Lengths, Normalize, PipelineConfig, Shape,
    SplitSize, TextStream, split,
};

/// Images whose every byte tells its place: byte `b` of image `i` is `(7 i + b) mod 251`.
fn images(n: usize, height: usize, width: usize, channels: usize) -> Images {
    let shape = Shape { height, width, channels, classes: 10 };
    let bytes = shape.image_bytes();
    let pixels = (0..n * bytes).map(|at| ((7 * (at / bytes) + at % bytes) % 251) as u8).collect();
    Images::new(shape, pixels, (0..n).map(|i| (i % 10) as u8).collect(), Path::new("test")).unwrap()
}

fn config(batch_size: usize, augment: Augment, channels: usize) -> PipelineConfig {
    let normalize = Normalize::unit(channels);
    PipelineConfig { batch_size, shuffle: true, augment, normalize, drop_last: false, indices: None }
}

const ALL: Augment =
    Augment { crop_pad: 2, crop_fill: Fill::Zero, flip: Flip::RANDOM, cutout: 3, mixup: 0.4 };

fn epoch(set: &Images, config: &PipelineConfig, seed: u64, epoch: u64, start: usize) -> Vec<ImageBatch> {
    ImagePipeline::new(set.clone(), config.clone(), seed).unwrap().epoch(epoch, start).collect()
}

#[test]
fn an_epoch_visits_every_sample_once_and_keeps_the_partial_batch() {
    let set = images(10, 2, 2, 1);
    let batches = epoch(&set, &config(4, Augment::default(), 1), 1, 0, 0);
    assert_eq!(batches.iter().map(|b| b.n).collect::<Vec<_>>(), [4, 4, 2]);
    // The first byte of image i is 7 i, normalised to 7 i / 255.
    let mut seen: Vec<f32> = batches.iter().flat_map(|b| b.pixels.iter().copied().step_by(4)).collect();
    seen.sort_by(f32::total_cmp);
    assert_eq!(seen, (0..10).map(|i| (7 * i) as f32 / 255.0).collect::<Vec<_>>());

    let dropped = PipelineConfig { drop_last: true, ..config(4, Augment::default(), 1) };
    assert_eq!(epoch(&set, &dropped, 1, 0, 0).iter().map(|b| b.n).collect::<Vec<_>>(), [4, 4]);
}

#[test]
fn seed_and_epoch_decide_the_order_and_nothing_else_does() {
    let (set, config) = (images(50, 4, 4, 3), config(8, ALL, 3));
    let first = epoch(&set, &config, 1, 0, 0);
    assert_eq!(first, epoch(&set, &config, 1, 0, 0));
    assert_ne!(first, epoch(&set, &config, 1, 1, 0));
    assert_ne!(first, epoch(&set, &config, 2, 0, 0));
}

#[test]
fn an_epoch_can_be_entered_in_the_middle() {
    let (set, config) = (images(50, 4, 4, 3), config(8, ALL, 3));
    let whole = epoch(&set, &config, 1, 3, 0);
    for start in 0..=whole.len() + 1 {
        assert_eq!(epoch(&set, &config, 1, 3, start), whole[start.min(whole.len())..]);
    }
}

#[test]
fn an_image_is_augmented_alike_in_any_batch() {
    let set = images(30, 4, 4, 3);
    let augment = Augment { mixup: 0.0, ..ALL };
    let by_label = |size: usize| {
        // Without shuffling, image i is at place i whatever the batch size.
        let config = PipelineConfig { shuffle: false, ..config(size, augment, 3) };
        epoch(&set, &config, 1, 5, 0).into_iter().flat_map(|b| b.pixels).collect::<Vec<f32>>()
    };
    assert_eq!(by_label(1), by_label(7));
}

#[test]
fn dropping_an_epoch_early_stops_its_thread() {
    let pipeline = ImagePipeline::new(images(1000, 4, 4, 3), config(1, ALL, 3), 1).unwrap();
    for taken in [0, 1, 5] {
        let mut epoch = pipeline.epoch(0, 0);
        assert_eq!(epoch.by_ref().take(taken).count(), taken);
        assert_eq!(epoch.len(), 1000 - taken);
        // Joins the thread: the test would hang if it did not end.
        drop(epoch);
    }
}

#[test]
fn only_the_chosen_samples_are_used() {
    let chosen: Arc<[u32]> = [3, 9, 27].into();
    let config = PipelineConfig { indices: Some(chosen), shuffle: false, ..config(2, Augment::default(), 1) };
    let batches = epoch(&images(30, 2, 2, 1), &config, 1, 0, 0);
    assert_eq!(batches.iter().flat_map(|b| b.labels.clone()).collect::<Vec<_>>(), [3, 9, 7]);
}

#[test]
fn background_and_strokes_of_any_length_are_looked_up_alike() {
    // Runs of black of every length up to 24, between strokes, in rows that are no multiple of eight.
    for width in 1..=27 {
        let shape = Shape { height: 3, width, channels: 1, classes: 10 };
        let bytes: Vec<u8> =
            (0..24usize).flat_map(|run| [vec![0; run], vec![run as u8 + 1]].concat()).collect();
        let pixels: Vec<u8> = bytes.iter().copied().cycle().take(6 * shape.image_bytes()).collect();
        let set = Images::new(shape, pixels.clone(), vec![0; 6], Path::new("test")).unwrap();
        let normalize = Normalize::mnist();
        let config = PipelineConfig { shuffle: false, normalize, ..config(6, Augment::default(), 1) };
        let made = &epoch(&set, &config, 1, 0, 0)[0].pixels;
        let expected: Vec<f32> = pixels.iter().map(|x| (f32::from(*x) / 255.0 - 0.1307) / 0.3081).collect();
        assert_eq!(*made, expected, "width {width}");
    }
}

#[test]
fn normalisation_is_divide_subtract_divide_in_f32() {
    let set = images(1, 2, 2, 3);
    let config = PipelineConfig { normalize: Normalize::cifar(), ..config(1, Augment::default(), 3) };
    let pixels = &epoch(&set, &config, 1, 0, 0)[0].pixels;
    let Normalize { mean, std } = Normalize::cifar();
    let expected =
        set.image(0).iter().enumerate().map(|(i, b)| (f32::from(*b) / 255.0 - mean[i % 3]) / std[i % 3]);
    assert!(pixels.iter().copied().eq(expected));
}

#[test]
fn every_crop_and_flip_is_a_window_of_the_padded_image_and_all_occur() {
    let (height, width, pad) = (3, 4, 1);
    // One image repeated, so that each sample shows another draw of the same picture. No byte of it is 0.
    let shape = Shape { height, width, channels: 1, classes: 10 };
    let picture: Vec<u8> = (1..=12).collect();
    let set = Images::new(shape, picture.repeat(400), vec![0; 400], Path::new("test")).unwrap();
    let window = |top: usize, left: usize, flip: bool| -> Vec<f32> {
        let at = |y: usize, x: usize| {
            let x = if flip { width - 1 - x } else { x };
            let place = (top + y).checked_sub(pad).zip((left + x).checked_sub(pad));
            let byte =
                place.filter(|(y, x)| *y < height && *x < width).map_or(0, |(y, x)| picture[y * width + x]);
            f32::from(byte) / 255.0
        };
        (0..height).flat_map(|y| (0..width).map(move |x| (y, x))).map(|(y, x)| at(y, x)).collect()
    };
    let mut expected = Vec::new();
    for top in 0..=2 * pad {
        for left in 0..=2 * pad {
            expected.extend([window(top, left, false), window(top, left, true)]);
        }
    }
    let mut seen = vec![0; expected.len()];
    let augment = Augment { crop_pad: pad, flip: Flip::RANDOM, ..Augment::default() };
    for batch in epoch(&set, &config(1, augment, 1), 1, 0, 0) {
        seen[expected.iter().position(|e| *e == batch.pixels).expect("a window of the padded image")] += 1;
    }
    // 400 draws of 18 equal chances: 22 expected, and below 5 or above 50 is more than four deviations away.
    assert!(seen.iter().all(|n| (5..50).contains(n)), "{seen:?}");
}

#[test]
fn every_reflected_crop_is_a_window_of_the_image_between_two_mirrors() {
    let (height, width, pad) = (4, 5, 2);
    let shape = Shape { height, width, channels: 1, classes: 10 };
    let picture: Vec<u8> = (1..=20).collect();
    let set = Images::new(shape, picture.repeat(800), vec![0; 800], Path::new("test")).unwrap();
    // What stands at each place of the padded image: PyTorch's `reflect`, written out.
    let (rows, columns) = ([2, 1, 0, 1, 2, 3, 2, 1], [2, 1, 0, 1, 2, 3, 4, 3, 2]);
    let windows = (0..=2 * pad).flat_map(|top| (0..=2 * pad).map(move |left| (top, left)));
    let window = |(top, left): (usize, usize)| -> Vec<f32> {
        let places = (0..height).flat_map(|y| (0..width).map(move |x| (top + y, left + x)));
        places.map(|(y, x)| f32::from(picture[rows[y] * width + columns[x]]) / 255.0).collect()
    };
    let expected: Vec<Vec<f32>> = windows.map(window).collect();
    let mut seen = vec![0; expected.len()];
    let augment = Augment { crop_pad: pad, crop_fill: Fill::Reflect, ..Augment::default() };
    for batch in epoch(&set, &config(1, augment, 1), 1, 0, 0) {
        seen[expected.iter().position(|e| *e == batch.pixels).expect("a window of the padded image")] += 1;
    }
    // 800 draws of 25 equal chances: 32 expected, and below 8 or above 60 is more than four deviations away.
    assert!(seen.iter().all(|n| (8..60).contains(n)), "{seen:?}");
}

#[test]
fn alternating_flips_begin_as_drawn_and_turn_every_image_every_epoch() {
    let set = images(200, 2, 4, 3);
    let shown = |flip: Flip, seed: u64, number: u64| {
        let config =
            PipelineConfig { shuffle: false, ..config(200, Augment { flip, ..Augment::default() }, 3) };
        epoch(&set, &config, seed, number, 0).remove(0).pixels
    };
    let plain = shown(Flip::NEVER, 1, 0);
    let turned = |pixels: &[f32]| -> Vec<bool> {
        pixels.chunks_exact(24).zip(plain.chunks_exact(24)).map(|(a, b)| a != b).collect()
    };
    let first = turned(&shown(Flip::ALTERNATE, 1, 0));
    assert_eq!(first, turned(&shown(Flip::RANDOM, 1, 0)));
    // Half of 200, four deviations around.
    assert!((72..=128).contains(&first.iter().filter(|turned| **turned).count()));
    for number in 1..5 {
        let found = turned(&shown(Flip::ALTERNATE, 1, number));
        assert!(found.iter().zip(&first).all(|(found, first)| (found == first) == (number % 2 == 0)));
    }
    assert_ne!(first, turned(&shown(Flip::ALTERNATE, 2, 0)), "by the seed");
}

#[test]
fn cutout_blanks_one_square_to_the_mean() {
    let set = images(200, 8, 8, 3);
    let normalize = Normalize { mean: vec![0.5; 3], std: vec![2.0; 3] };
    let augment = Augment { cutout: 4, ..Augment::default() };
    for (with, without) in [(augment, Augment::default())] {
        let run = |augment| {
            let config =
                PipelineConfig { normalize: normalize.clone(), shuffle: false, ..config(200, augment, 3) };
            epoch(&set, &config, 1, 0, 0).remove(0).pixels
        };
        let (cut, plain) = (run(with), run(without));
        let mut whole = 0;
        for (cut, plain) in cut.chunks_exact(8 * 8 * 3).zip(plain.chunks_exact(8 * 8 * 3)) {
            let blank: Vec<usize> = (0..64).filter(|i| cut[3 * i..][..3] == [0.0; 3]).collect();
            assert!((0..192).all(|i| cut[i] == plain[i] || blank.contains(&(i / 3))));
            let (rows, columns) = (blank.iter().map(|i| i / 8), blank.iter().map(|i| i % 8));
            let span = |v: &mut dyn Iterator<Item = usize>| {
                let v: Vec<usize> = v.collect();
                1 + v.iter().max().unwrap() - v.iter().min().unwrap()
            };
            let (rows, columns) = (span(&mut rows.into_iter()), span(&mut columns.into_iter()));
            assert_eq!(rows * columns, blank.len());
            assert!((2..=4).contains(&rows) && (2..=4).contains(&columns));
            whole += usize::from(blank.len() == 16);
        }
        // Centres 2..=6 of 8 keep the square whole: (5/8)² of 200 is 78; four deviations are 28.
        assert!((50..=106).contains(&whole), "{whole}");
    }
}

#[test]
fn mixup_is_a_convex_mixture_and_names_the_partners() {
    let set = images(64, 4, 4, 1);
    let run = |mixup| {
        let config = config(16, Augment { mixup, ..Augment::default() }, 1);
        epoch(&set, &config, 3, 0, 0)
    };
    let mut parts = Vec::new();
    for (mixed, plain) in run(0.4).iter().zip(run(0.0)) {
        let mix = mixed.mix.as_ref().unwrap();
        assert_eq!(mixed.labels, plain.labels);
        parts.push(mix.part);
        for i in 0..16 {
            let own = &plain.pixels[16 * i..][..16];
            let found = &mixed.pixels[16 * i..][..16];
            let is_partner = |j: usize| {
                let other = &plain.pixels[16 * j..][..16];
                own.iter()
                    .zip(other)
                    .map(|(a, b)| mix.part * a + (1.0 - mix.part) * b)
                    .eq(found.iter().copied())
            };
            assert!((0..16).any(|j| is_partner(j) && plain.labels[j] == mix.labels[i]));
        }
    }
    assert!(
        parts.iter().all(|p| (0.0..=1.0).contains(p)) && parts.windows(2).all(|w| w[0] != w[1]),
        "{parts:?}"
    );
}

#[test]
fn a_configuration_that_cannot_work_is_refused() {
    let refused = |change: fn(&mut PipelineConfig), key: &str| {
        let mut config = config(4, Augment::default(), 1);
        change(&mut config);
        let message = ImagePipeline::new(images(5, 2, 2, 1), config, 1).err().expect(key).to_string();
        assert!(message.contains(key), "{message}");
    };
    refused(|c| c.batch_size = 0, "batch_size");
    refused(|c| c.normalize = Normalize::unit(3), "normalize");
    refused(|c| c.normalize.std = vec![0.0], "normalize");
    refused(|c| c.augment.mixup = f64::NAN, "mixup");
    refused(|c| c.augment.crop_pad = usize::MAX, "crop_pad");
    refused(|c| (c.augment.crop_pad, c.augment.crop_fill) = (2, Fill::Reflect), "crop_fill: reflect");
    refused(|c| c.augment.cutout = usize::MAX, "cutout");
    refused(|c| c.indices = Some([5].into()), "indices");
}

#[test]
fn streams_are_contiguous_and_targets_are_one_step_later() {
    // 3 streams of 5 tokens; the last 2 tokens are dropped.
    let stream = TextStream::new((0..17).collect(), 3).unwrap();
    assert_eq!((stream.streams(), stream.steps()), (3, 5));
    let batch = stream.batch(1, 2);
    assert_eq!(batch.input, [1, 6, 11, 2, 7, 12]);
    assert_eq!(batch.target, [2, 7, 12, 3, 8, 13]);
    assert!(TextStream::new((0..8).collect(), 3).is_err() && TextStream::new((0..8).collect(), 0).is_err());
}

#[test]
fn evaluation_reads_every_token_once_in_one_stream() {
    let stream = TextStream::new((0..151).collect(), 1).unwrap();
    let windows: Vec<_> = stream.fixed_windows(70).collect();
    assert_eq!(windows.iter().map(|w| (w.start, w.len)).collect::<Vec<_>>(), [(0, 70), (70, 70), (140, 10)]);
    let targets: Vec<u32> = windows.iter().flat_map(|w| stream.batch(w.start, w.len).target).collect();
    assert!(targets.into_iter().eq(1..151));
}

#[test]
fn training_windows_have_the_published_distribution() {
    let stream = TextStream::new(vec![0; 2_000_003].into(), 1).unwrap();
    let windows: Vec<_> = stream.windows(1, 0, Lengths::awd(70)).collect();
    let n = windows.len() as f64;
    let long: Vec<f64> = windows.iter().map(|w| w.len as f64).filter(|l| *l > 52.5).collect();
    // 52.5 is 3.5 deviations from both centres. Truncation lowers the mean by one half.
    let share = long.len() as f64 / n;
    let mean = long.iter().sum::<f64>() / long.len() as f64;
    let deviation = (long.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / long.len() as f64).sqrt();
    // About 29,300 windows: five standard errors are 0.0064, 0.15 and 0.10 (and 1/12 of variance from truncation).
    assert!((share - 0.95).abs() < 0.0064, "{share}");
    assert!((mean - 69.5).abs() < 0.15, "{mean}");
    assert!((deviation - 5.0).abs() < 0.11, "{deviation}");
    assert!(windows.iter().rev().skip(1).all(|w| w.rate_scale == w.len as f64 / 70.0 && w.len >= 5));
}

proptest! {
    #[test]
    fn training_windows_follow_each_other_to_the_end(tokens in 3usize..2000, batch in 1usize..5, seed: u64, epoch: u64) {
        let Ok(stream) = TextStream::new(vec![0; tokens].into(), batch) else { return Ok(()) };
        let mut at = 0;
        for window in stream.windows(seed, epoch, Lengths::awd(70)) {
            prop_assert_eq!(window.start, at);
            prop_assert!(window.len > 0);
            at += window.len;
            prop_assert_eq!(stream.batch(window.start, window.len).input.len(), window.len * batch);
        }
        // At most one step is left over.
        prop_assert!(at < stream.steps() && at + 2 >= stream.steps());
    }

    #[test]
    fn a_split_is_a_partition_of_the_asked_size(n in 0usize..500, count in 0usize..600, seed: u64) {
        let (train, validation) = split(n, SplitSize::Count(count), seed);
        prop_assert_eq!(validation.len(), count.min(n));
        let mut all: Vec<u32> = train.iter().chain(&validation).copied().collect();
        all.sort_unstable();
        prop_assert!(all.into_iter().eq(0..n as u32));
        prop_assert!(train.is_sorted() && validation.is_sorted());
        prop_assert_eq!(split(n, SplitSize::Count(count), seed), (train, validation));
    }
}

#[test]
fn a_split_size_is_a_count_or_a_fraction() {
    let parse = |text: &str| serde_json::from_str::<SplitSize>(text).unwrap();
    assert_eq!(parse("5000").of(60_000), 5000);
    assert_eq!(parse("0.1").of(60_000), 6000);
    assert_eq!((parse("2.0").of(10), parse("-1.0").of(10)), (10, 0));
}

#[test]
fn shares_of_a_mix_are_numbers_for_every_strength() {
    let set = images(64, 4, 4, 1);
    for mixup in [f64::from_bits(1), 1e-320, 1e-300, 1e3, f64::MAX] {
        let config = config(16, Augment { mixup, ..Augment::default() }, 1);
        for batch in epoch(&set, &config, 3, 0, 0) {
            let part = batch.mix.as_ref().unwrap().part;
            assert!((0.0..=1.0).contains(&part), "{mixup:e}: {part}");
            assert!(batch.pixels.iter().all(|pixel| pixel.is_finite()), "{mixup:e}");
        }
    }
}
