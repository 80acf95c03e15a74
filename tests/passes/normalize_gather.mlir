// RUN: secc opt %s -p 'normalize-loss{gather="image","text" global-batch=64},dce' | filecheck %s

// An op that compares samples takes the rows of all samples of the global batch. The loss of these counts by the micro-batch's share.

sec.graph "clip" {
  sec.symbol "B" kind "rows" key "x" dim 0
  sec.block "image" class "Linear" params 10 trainable 10
  sec.block "text" class "Linear" params 10 trainable 10
  sec.case "all" when [] {
    %x = sec.input "x" : !sec.tensor<[B, 8], f32>
    %a = sec.call "image" (%x) args "$0" outs [""] : !sec.tensor<[B, 16], f32, grad>
    %b = sec.call "text" (%x) args "$0" outs [""] : !sec.tensor<[B, 16], f32, grad>
    %t = sec.glue "aten.permute.default" (%b) args "$0, [1, 0]" : !sec.tensor<[16, B], f32, grad>
    %s = sec.glue "aten.mm.default" (%a, %t) args "$0, $1" at "model.py:3" : !sec.tensor<[B, B], f32, grad>
    %l = sec.glue "aten._log_softmax.default" (%s) args "$0, 1, False" : !sec.tensor<[B, B], f32, grad>
    %y = sec.glue "aten.arange.default" () args "B" : !sec.tensor<[B], i64>
    %loss, %n = sec.glue "aten.nll_loss_forward.default" (%l, %y) args "$0, $1, None, 1, -100" at "model.py:4" : !sec.tensor<[], f32, grad>, !sec.tensor<[], f32>
    sec.return (%loss)

    // CHECK: %0 = sec.glue "batch.gathered" (%a) args "$0, \22rows:image\22" : !sec.tensor<[all_samples, 16], f32, grad>
    // CHECK: [[FIRST:%[0-9]+]] = sec.glue "aten.movedim.int" (%t) args "$0, 1, 0"
    // CHECK-NEXT: sec.glue "batch.gathered" ([[FIRST]]) args "$0, \22rows:text\22"
    // CHECK: sec.glue "aten.mm.default" {{.*}} : !sec.tensor<[all_samples, all_samples], f32, grad>
    // CHECK: sec.glue "aten.arange.default" args "all_samples"
    // CHECK: sec.term "rows:image" (%a)
    // CHECK-NEXT: sec.term "rows:text" ([[FIRST]])
    // CHECK-NEXT: [[SHARE:%[0-9]+]] = sec.glue "aten.mul.Tensor" (%loss) args "$0, B"
    // CHECK: sec.term "loss" ([[SHARE]], {{.*}}) at "model.py:4"
  }
}
