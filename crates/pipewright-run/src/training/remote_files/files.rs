//! Where a process has the files of its run.

use std::sync::Arc;

use pipewright::checkpoint::PartSender;

use crate::training::remote_files::client::{Client, Upload};
use crate::training::remote_files::mirror::Mirror;
use crate::training::remote_files::service::FileService;

/// Where a process has the files of its run.
pub(crate) enum Files {
    /// In folders that all processes see.
    Shared,
    /// This is the first process, and others get its files.
    First(FileService),
    /// In the folders of the first process, on its host.
    Near,
    /// On another host.
    Remote(RemoteFiles),
}

/// The files of the first process, as another host sees them.
pub(crate) struct RemoteFiles {
    pub(crate) client: Arc<Client>,
    pub(crate) mirror: Mirror,
}

impl RemoteFiles {
    /// Returns a sender of parts of checkpoints.
    pub(crate) fn upload(&self) -> impl PartSender + 'static {
        Upload(self.client.clone())
    }
}
