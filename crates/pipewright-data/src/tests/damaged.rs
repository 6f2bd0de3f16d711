//! Files of token ids that are damaged, or change while a run reads them.

use std::path::Path;

use tempfile::TempDir;

use super::has_error;
use super::tokenized::{CHATS, TEXTS, batches, check_refused, folder, reading, tokenize};
use crate::tokenized::header::Header;
use crate::{DataConfig, TokenRows};

#[test]
fn a_damaged_file_is_refused() {
    let refused = |damage: fn(&mut Vec<u8>), part: &str| check_refused(CHATS, damage, |_| {}, part);
    refused(|bytes| bytes.truncate(bytes.len() - 1), "bytes, and its header says ");
    refused(|bytes| bytes.push(0), "bytes, and its header says ");
    refused(|bytes| bytes.truncate(100), "data.pwtok: the header is damaged: it ends early");
    refused(|bytes| bytes[30] ^= 1, "data.pwtok: the header is damaged: its checksum differs");
    refused(|bytes| bytes[8] = 9, "data.pwtok: its version is 9, and this program reads version 3");
    refused(|bytes| bytes[1] = 0, "the name ends in .pwtok");
    refused(
        |bytes| {
            // The last byte of the hash of the only block.
            let end = bytes.len();
            bytes[end - 1] ^= 1;
        },
        "the lists behind its token ids contradict its header",
    );
    refused(
        |bytes| {
            // Three sizes and a hash end the file, and the sum of the sizes stays the same.
            let sizes = bytes.len() - 12 - 32;
            bytes[sizes] += 2;
            bytes[sizes + 4] -= 2;
        },
        "the lists behind its token ids contradict its header",
    );
}

/// Opens a file, for a model with 128 ids, and then makes the byte `byte` of the token ids `id`. `before`
/// runs on the rows before the change.
fn open_damaged(
    files: &[(&str, &str)],
    (byte, id): (usize, u8),
    change: impl FnOnce(&mut DataConfig),
    before: impl FnOnce(&mut TokenRows),
) -> (TempDir, TokenRows) {
    let (folder, config) = folder(files, change);
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let mut rows = reading(&config, &file).open(128, 1).expect("the file is whole");
    before(&mut rows);
    let mut bytes = std::fs::read(&file).expect("the file");
    assert_ne!(bytes[4096 + byte], id);
    bytes[4096 + byte] = id;
    std::fs::write(&file, bytes).expect("the file");
    (folder, rows)
}

/// Returns the first error of an epoch of batches, and of an epoch of rows that are shown.
fn errors(rows: &TokenRows) -> [String; 2] {
    let (mut batches, mut parts) = (rows.clone(), rows.clone());
    let numbers = || 0..rows.rows();
    let batch = numbers().find_map(|_| batches.next_batch(1).err()).expect("an id is damaged");
    let part = numbers().find_map(|_| parts.next_row_parts().err()).expect("an id is damaged");
    [batch.to_string(), part.to_string()]
}

#[test]
fn a_damaged_byte_is_an_error_of_whatever_reads_it() {
    let part = "data.pwtok: the file is damaged: its token ids do not have the hash that was written with them; copy the";
    let check = |rows: &TokenRows, is_known: bool| {
        let mut found = errors(rows).to_vec();
        if !is_known {
            found.extend(rows.frequency_entropy().err().map(|error| error.to_string()));
            assert_eq!(found.len(), 3);
        }
        found.iter().for_each(|error| assert!(error.contains(part), "{error}\nhas not: {part}"));
    };
    for id in [b'z', 200] {
        let (_folder, rows) = open_damaged(TEXTS, (33, id), |_| {}, |_| {});
        check(&rows, true);
        let (first, second) = rows.hold_out(0.4).expect("it divides");
        check(&first, false);
        check(&second, false);
        first.identity().expect_err("an id is damaged");
        // The first bit of the first record's targets is in the byte 46.
        for byte in [1, 46] {
            let damaged = || open_damaged(CHATS, (byte, id), |config| config.seq_len = 60, |_| {});
            check(&damaged().1, true);
            check(&damaged().1.hold_out(0.4).expect("it divides").0, false);
        }
    }
}

#[test]
fn a_file_that_is_changed_after_it_was_read_has_no_id_beyond_the_vocabulary() {
    let check = |files: &[(&str, &str)], byte: usize, part: &str| {
        let before = |rows: &mut TokenRows| drop(batches(rows));
        let (_folder, rows) = open_damaged(files, (byte, 200), |config| config.seq_len = 50, before);
        errors(&rows).iter().for_each(|error| assert!(error.contains(part), "{error}\nhas not: {part}"));
    };
    let token = "data.pwtok: the file is damaged: token 33 has the id 200, and the largest in its header is 119; copy the";
    check(TEXTS, 33, token);
    // The first record has 46 ids and 6 bytes of bits.
    check(CHATS, 46 + 6 + 2, "data.pwtok: the file is damaged: record 2 has the id 200, and the largest in");
}

#[test]
fn each_block_has_a_hash_of_its_own() {
    let text = "to be or not to be".repeat(100_000);
    let (folder, config) =
        folder(&[("a.txt", &text)], |config| (config.seq_len, config.shuffle) = (1000, false));
    let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
    let mut bytes = std::fs::read(&file).expect("the file");
    bytes[4096 + (1 << 20)] ^= 1;
    std::fs::write(&file, bytes).expect("the file");
    let mut rows = reading(&config, &file).open(256, 1).expect("the header and the lists are whole");
    let good = (0..rows.rows()).take_while(|_| rows.next_batch(1).is_ok()).count();
    // Row 1048 has the first byte of the second block.
    assert_eq!((good, rows.rows()), (1048, 1799));
}

#[test]
fn a_header_with_more_bytes_than_a_file_can_have_is_refused() {
    let damage = |bytes: &mut Vec<u8>| {
        let header = Header::parse(&bytes[..4096], Path::new("a")).expect("a header");
        let header = Header { bytes: u64::MAX, ..header };
        bytes.splice(..4096, header.to_bytes());
    };
    check_refused(
        TEXTS,
        damage,
        |_| {},
        "the header is damaged: it says more bytes than a file can have; copy",
    );
}

#[test]
fn a_file_that_becomes_shorter_is_an_error_of_the_batch() {
    for files in [TEXTS, CHATS] {
        let (folder, config) = folder(files, |config| config.seq_len = 45);
        let (_, file) = tokenize(&config, folder.path()).expect("it is tokenized");
        let mut rows = reading(&config, &file).open(256, 1).expect("good data");
        let expected = batches(&mut rows.clone());
        let whole = std::fs::read(&file).expect("the file");
        rows.next_batch(1).expect("it can be read");
        let cursor = rows.cursor();
        let shortened = std::fs::OpenOptions::new().write(true).open(&file).expect("the file");
        shortened.set_len(4100).expect("it becomes shorter");
        has_error(rows.next_batch(1), "data.pwtok: cannot be read");
        rows.next_row_parts().expect_err("the row is gone");
        assert_eq!(rows.cursor(), cursor);
        // Writing keeps the file that is open.
        std::fs::write(&file, whole).expect("the file");
        assert_eq!(rows.next_batch(1).expect("it can be read"), expected[1]);
    }
}
