//! Files in GGUF with other numbers in their headers, and files that were cut: each is read or refused with a sentence, and no
//! reader allocates more than a file of its size can need.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use pipewright_gguf::{Gguf, files};
use pipewright_shapes::reader;
use tempfile::TempDir;

/// Counts the bytes that the process holds, and the most at once.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller's contract is the inner allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// The bytes that may be held for each byte of a file: a list of bytes becomes a list of JSON values.
const FACTOR: usize = 200;
/// What a reader may hold whatever the size of the file: its buffer, and the vocabulary of bytes.
const FIXED: usize = 1 << 20;

/// Reads all parts of a model and its shape. Errors are sentences.
fn read(path: &Path, what: &str) {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let opened = Gguf::open(path).map(drop);
    let mut errors: Vec<String> = opened.err().map(|error| error.to_string()).into_iter().collect();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        match files::read(&path.join(name), u64::MAX) {
            Ok(content) if name == "config.json" => {
                let shape = reader::read(&String::from_utf8(content).expect("JSON is text"));
                errors.extend(shape.err().map(|error| error.to_string()));
            }
            Ok(_) => {}
            Err(error) => errors.push(error.to_string()),
        }
    }
    let most = MOST.load(Ordering::Relaxed) - before;
    let length = fs::metadata(path).expect("a file").len() as usize;
    assert!(most <= FACTOR * length + FIXED, "{what}: {most} bytes for a file of {length}");
    for error in errors {
        assert!(error.len() > 20 && !error.contains(char::is_control), "{what}: {error}");
    }
}

#[test]
fn spoiled_headers_are_refused_in_a_sentence() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let models = data.join("../../../pipewright-models/tests/data");
    let names =
        ["gemma3-tiny.gguf", "gpt2-gguf/tiny.gguf", "llama-gguf/tiny.gguf"].map(|name| models.join(name));
    let tokenizers = ["gpt2.gguf", "pieces.gguf"].map(|name| data.join(name));
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("m.gguf");
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below
    };
    for file in names.iter().chain(&tokenizers) {
        let whole = fs::read(file).expect("a file");
        // The tensors of the models begin behind their headers, of a few thousand bytes.
        let header = whole.len().min(9000);
        let numbers = [
            0,
            1,
            9,
            31,
            255,
            65_536,
            1 << 31,
            u64::from(u32::MAX),
            1 << 40,
            1 << 62,
            u64::MAX - 31,
            u64::MAX,
        ];
        for round in 0..1500 {
            let (place, mut bytes) = (next(header - 8), whole.clone());
            let number = if next(4) == 0 { next(200) as u64 } else { numbers[next(numbers.len())] };
            let width = [1, 4, 8][next(3)];
            bytes[place..place + width].copy_from_slice(&number.to_le_bytes()[..width]);
            if round % 10 == 0 {
                bytes.truncate(next(whole.len()));
            }
            fs::write(&path, &bytes).expect("it is writable");
            read(&path, &format!("{}, {number} in {width} bytes from {place} on", file.display()));
        }
    }
}
