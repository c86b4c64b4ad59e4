//! Parts shared by the command lines of this project: access to the API, output, the log, manual
//! pages and completion.

pub mod api;
pub mod completion;
pub mod listing;
pub mod logging;
pub mod man;
pub mod view;
